"""The format in which a model calls tools: how it is explained to a model, and the grammar that holds it to it. Pure.

    <tool_call>
    {"name": "…", "arguments": {…}}
    </tool_call>

It is that of Hermes and Qwen models, whose templates explain it themselves. To other models a system message explains
it; their earlier calls and the tools' results are written in the same format.
"""

import json
from collections.abc import Sequence
from typing import Any

from schemas.errors import InvalidParameter
from schemas.generation import GenerateRequest
from schemas.tools import MAX_TOOLS, NamedTool, Tool
from services.tokenizer.grammar_check import GrammarSource
from services.tokenizer.structured_output import bound_schema

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BODY_BEGIN, ARGUMENTS_BEGIN, BODY_END = '{"name": ', ', "arguments": ', "}"
MAX_CALLS = 16
"""Calls in one answer: small models would go on for ever."""

EXPLANATION = """\
You can call functions. Their signatures:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
If no function is of use, answer in words."""


def tools_in_use(request: GenerateRequest) -> tuple[Tool, ...]:
    """Return the tools that the answer may call; raises InvalidParameter when the options contradict each other."""
    tools, choice = request.tools, request.tool_choice
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidParameter("tool_choice needs tools.", param="tool_choice")
        return ()
    if not 0 < len(tools) <= MAX_TOOLS:
        raise InvalidParameter(f"tools must have 1 to {MAX_TOOLS} entries, not {len(tools)}.", param="tools")
    if request.messages is None:
        raise InvalidParameter("tools need messages; a plain prompt has no place for them.", param="tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidParameter("Two tools have the same name.", param="tools")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise InvalidParameter("tool_choice names a tool that is not among the tools.", param="tool_choice")
        return tuple(tool for tool in tools if tool.function.name == choice.function.name)
    return () if choice == "none" else tools


def explain(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return a conversation for a template that knows nothing of tools."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    signatures = "\n".join(json.dumps(signature(tool), ensure_ascii=False) for tool in tools)
    text = EXPLANATION.format(tools=signatures)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def signature(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates show it."""
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls") or ()
    if not calls:
        return message
    written = "\n".join(_written(call["function"]) for call in calls)
    content = message["content"]
    return {"role": message["role"], "content": f"{content}\n{written}" if content else written}


def _written(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f"{OPEN}\n{BODY_BEGIN}{name}{ARGUMENTS_BEGIN}{text}{BODY_END}\n{CLOSE}"


def tool_grammar(request: GenerateRequest, tools: Sequence[Tool]) -> GrammarSource | None:
    """Return what binds an answer to well-formed calls of `tools`, and to text before them where that is free."""
    if not tools:
        return None
    must_call = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
    only_one = request.parallel_tool_calls is False or isinstance(request.tool_choice, NamedTool)
    more = "" if only_one else f' ("\\n{OPEN}" call){{0,{MAX_CALLS - 1}}}'
    start = f'start: "{OPEN}" call{more}' if must_call else f"start: TEXT | opening call{more}"
    bodies = " | ".join(f"body_{number}" for number in range(len(tools)))
    rules = [start, f'call: "\\n" ({bodies}) "\\n{CLOSE}"']
    if not must_call:
        rules += [f'opening[lazy]: TEXT "{OPEN}"', r"TEXT: /(.|\n)*/"]
    arguments = [_arguments_of(tool) for tool in tools]
    rules += [_body_rule(number, tool, arguments[number].text) for number, tool in enumerate(tools)]
    patterns = tuple(pattern for bound in arguments for pattern in bound.patterns)
    return GrammarSource("\n".join(["%llguidance {}", *rules]), "tools", patterns)


def _arguments_of(tool: Tool) -> GrammarSource:
    function = tool.function
    none: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = none if function.parameters is None else dict(function.parameters)
    if schema.setdefault("type", "object") != "object":
        raise InvalidParameter(f"The parameters of {function.name} must be a schema of type object.", param="tools")
    return bound_schema(schema, "tools")


def _body_rule(number: int, tool: Tool, arguments: str) -> str:
    begin = json.dumps(f"{BODY_BEGIN}{json.dumps(tool.function.name)}{ARGUMENTS_BEGIN}")
    return f'body_{number}: {begin} %json {arguments} "{BODY_END}"'
