"""Chat templates: what they get, what they may do, and how they fail."""

import pytest
from jinja2.exceptions import SecurityError

from schemas.errors import InvalidParameter
from schemas.generation import ChatMessage
from services.tokenizer.chat_template import END_OF_MESSAGE, MAX_TEMPLATE_CHARS, ChatTemplate
from services.tokenizer.template_worker import compiled

PLAIN = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def messages(*turns: dict[str, object]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage.model_validate(turn, strict=False) for turn in turns)


def render(source: str, *turns: dict[str, object], prompt: bool = True, goes_on: bool = False) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages(*turns), add_generation_prompt=prompt, continue_final_message=goes_on)


USER = {"role": "user", "content": "Hi"}


def test_conversation_ends_where_the_answer_begins() -> None:
    assert render(PLAIN, USER) == "<user>Hi</end>\n<assistant>"
    assert render(PLAIN, USER, prompt=False) == "<user>Hi</end>\n"


def test_template_sees_special_tokens_tools_and_further_fields() -> None:
    source = "{{ bos_token }}{{ messages[0].name }}{{ messages[0].mood | tojson }}{{ tools is none }}"
    turn = {**USER, "name": "ann", "mood": [{"é": "<"}]}
    assert render(source, turn) == '<s>ann[{"é": "<"}]True'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", USER) == '{"a": 2, "b": 1}'


def test_content_parts_are_joined_and_missing_content_is_empty() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(PLAIN, {"role": "user", "content": parts}, prompt=False) == "<user>one\ntwo</end>\n"
    silent = {"role": "assistant", "content": None}
    assert render(PLAIN, silent, prompt=False) == "<assistant></end>\n"
    assert render(PLAIN, {"role": "user", "content": []}, prompt=False) == "<user></end>\n"


@pytest.mark.parametrize("content", ["The answer is", "end", "", " spaced  ", "a</end>\nb", "assistant", "é😀"])
def test_final_message_is_continued_exactly_where_it_ends(content: str) -> None:
    answer = {"role": "assistant", "content": content}
    assert render(PLAIN, USER, answer, prompt=False, goes_on=True) == f"<user>Hi</end>\n<assistant>{content}"


def test_final_message_of_parts_is_continued() -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render(PLAIN, USER, answer, prompt=False, goes_on=True).endswith("<assistant>a\nb")


def test_marker_in_the_clients_own_text_does_not_cut_earlier() -> None:
    turn = {"role": "user", "content": f"x{END_OF_MESSAGE}y"}
    assert render(PLAIN, turn, prompt=False, goes_on=True) == f"<user>x{END_OF_MESSAGE}y"


def test_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(InvalidParameter, match="cannot be continued") as raised:
        render("nothing", USER, goes_on=True)
    assert raised.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages.append('x') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{% include 'x' %}",
        "{{ range(1000000000) | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['datetime'] }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ (messages[0] | attr('__class__')).__subclasses__() }}",
    ],
)
def test_refusing_failing_or_forbidden_template_is_a_coded_error(source: str) -> None:
    with pytest.raises(InvalidParameter, match="chat template refuses") as raised:
        render(source, USER)
    assert raised.value.param == "messages"
    assert raised.value.__cause__ is None


def test_reason_of_a_refusal_is_told_but_not_at_any_length() -> None:
    with pytest.raises(InvalidParameter, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", USER)
    with pytest.raises(InvalidParameter) as raised:
        render("{{ raise_exception(messages[0].content) }}", {"role": "user", "content": "x" * 100_000})
    assert len(raised.value.message) < 1000


def test_sandbox_forbids_and_changes_nothing() -> None:
    environment = compiled("x").environment
    with pytest.raises(SecurityError):
        environment.from_string("{{ [].__class__.__mro__ }}").render()
    turns = [1]
    with pytest.raises(SecurityError):
        environment.from_string("{% do turns.append(2) %}{{ turns.append(2) }}".replace("{% do turns.append(2) %}", ""))
        environment.from_string("{{ turns.append(2) }}").render(turns=turns)
    assert turns == [1]


@pytest.mark.parametrize("source", ["{% for x in %}", "{{ x", "{% endif %}", "{% unknown %}", "{{ x | nofilter }}"])
def test_wrong_syntax_is_found_when_compiling(source: str) -> None:
    with pytest.raises(ValueError, match="chat template has an error"):
        ChatTemplate(source, {})


def test_too_long_template_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1), {})


def test_loop_controls_and_the_date_are_there() -> None:
    source = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}"
    assert render(source, USER, USER) == "Hi4"
