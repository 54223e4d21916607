"""How tools are explained to a model, and what holds its calls to the format."""

import json
from typing import Any

import pytest

from schemas.errors import InvalidParameter
from schemas.generation import ChatMessage, GenerateRequest
from schemas.tools import Tool
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.tool_format import tool_grammar, tools_in_use
from services.tokenizer.vocabulary import BYTE_CHAT_TEMPLATE
from tests.unit.tokenizer.grammars import BYTES, CHECK, accepts

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 2000}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "now"}}


def request(**fields: Any) -> GenerateRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return GenerateRequest.model_validate_json(json.dumps(body))


def follows(text: str, **fields: Any) -> bool:
    asked = request(**{"tools": [WEATHER, NOW], **fields})
    source = tool_grammar(asked, tools_in_use(asked))
    assert source is not None
    CHECK.check(source)
    return accepts(source.text, text)


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({}, "Just words < here.", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
        ({"tool_choice": "auto"}, f"Well: {CALL}\n{CALL_NOW}", f"{CALL} and more"),
        ({"tool_choice": "required"}, f"{CALL}\n{CALL_NOW}", "Just words."),
        ({"tool_choice": "required", "parallel_tool_calls": False}, CALL, f"{CALL}\n{CALL_NOW}"),
        ({"tool_choice": NAMED}, CALL_NOW, CALL),
        ({}, CALL, CALL.replace("city", "town")),
        ({}, CALL_NOW, CALL_NOW.replace("{}", '{"a": 1}')),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_answers_follow_the_format(fields: dict[str, Any], right: str, wrong: str) -> None:
    assert follows(right, **fields)
    assert not follows(wrong, **fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [NOW] * 200}, "tools"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW], "messages": None, "prompt": "x"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    asked = request(**fields)
    with pytest.raises(InvalidParameter) as refused:
        source = tool_grammar(asked, tools_in_use(asked))
        assert source is not None
        CHECK.check(source)
    assert refused.value.param == param


def test_tools_that_must_not_be_called_are_not_in_use() -> None:
    assert tools_in_use(request(tools=[NOW], tool_choice="none")) == ()
    assert tools_in_use(request(tool_choice="none")) == ()


def rendered(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    parsed = tuple(ChatMessage.model_validate_json(json.dumps(message)) for message in messages)
    offered = tuple(Tool.model_validate(tool) for tool in tools)
    compiled = ChatTemplate(template, BYTES.template_tokens)
    return compiled.render(parsed, add_generation_prompt=False, continue_final_message=False, tools=offered)


TURNS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"n": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "Sunny"},
]


def test_a_template_without_tools_gets_them_explained_and_earlier_calls_written_out() -> None:
    text = rendered(BYTE_CHAT_TEMPLATE, TURNS, [WEATHER])
    assert text.startswith("system: You can call functions.")
    assert '"name": "get_weather"' in text
    assert 'assistant: <tool_call>\n{"name": "now", "arguments": {"n": 1}}\n</tool_call>\n' in text
    assert "user: <tool_response>\nSunny\n</tool_response>\n" in text


def test_a_system_message_stays_the_first() -> None:
    text = rendered(BYTE_CHAT_TEMPLATE, [{"role": "system", "content": "Be brief."}, *TURNS], [WEATHER])
    assert text.startswith("system: Be brief.\n\nYou can call functions.")
    assert text.count("system: ") == 1


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    template = (
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{# <tool_call> #}"
        "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls %}{{ c.function.arguments.n }}{% endfor %}"
        "{% endfor %}"
    )
    assert rendered(template, TURNS, [WEATHER]) == "get_weatheruserassistant1tool"


def test_variables_reach_the_template_but_do_not_replace_its_own() -> None:
    template = ChatTemplate("{{ mood }}{{ messages | length }}", BYTES.template_tokens)
    text = template.render(
        (ChatMessage(role="user", content="x"),),
        add_generation_prompt=True,
        continue_final_message=False,
        variables={"mood": "happy", "messages": []},
    )
    assert text == "happy1"
