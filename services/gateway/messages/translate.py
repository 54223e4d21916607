"""A Messages body becomes the request that the pipeline understands. Pure: knows neither HTTP nor the bus.

Tool results, which a user's turn holds, become turns of their own; a last turn of the assistant is continued.
"""

import json
from collections.abc import Iterator
from typing import Any

from schemas.anthropic import (
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    OtherBlock,
    ResultBlock,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from schemas.errors import InvalidParameter, UnsupportedParameter
from schemas.tokenization import TokenizeRequest
from services.gateway.naming import EXTENSIONS, NOT_IN_ONE_ANSWER
from services.gateway.translate import AnswerOptions, Translation, generate_request, parse_fields

NAMES = {"stop": "stop_sequences", "response_format": "output_config"}
"""Fields of the request that have another name in a body."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
    "speed": ("standard",),
    "fallbacks": ([],),
    **{name: (1,) if name == "n" else (False,) for name in NOT_IN_ONE_ANSWER},
}
"""Known options that cannot be honoured, and the values of them that ask for nothing; null always does."""

Turn = dict[str, Any]


def translate_messages(body: MessagesRequest, default_model: str, default_id: str) -> Translation:
    """Return the one request that a message asks for; raises InvalidParameter, UnsupportedParameter."""
    extra = body.model_extra or {}
    refuse_unsupported(extra, NEUTRAL)
    fields = {
        "model": default_model,
        "request_id": default_id,
        **{name: value for name, value in extra.items() if name in EXTENSIONS and value is not None},
        **_conversation(body),
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "response_format": _response_format(body),
        "deliver": "log",
    }
    request = generate_request({name: value for name, value in fields.items() if value is not None})
    return Translation(request.request_id or "", (request,), AnswerOptions(stream=bool(body.stream)))


def translate_count(body: CountTokensRequest, default_model: str) -> TokenizeRequest:
    """Return the request for the tokens that an answer would be generated from."""
    refuse_unsupported(body.model_extra or {}, NEUTRAL)
    fields = {"model": default_model, **_conversation(body)}
    choice = fields.pop("tool_choice", None)
    fields.pop("parallel_tool_calls", None)
    if choice == "none":
        fields.pop("tools", None)
    if isinstance(choice, dict):
        fields["tools"] = [tool for tool in fields["tools"] if tool["function"]["name"] == choice["function"]["name"]]
    return parse_fields(TokenizeRequest, fields)


def refuse_unsupported(extra: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedParameter for an option that is known and asks for something that cannot be done."""
    for name in sorted(extra.keys() & neutral.keys()):
        if extra[name] is not None and extra[name] not in neutral[name]:
            raise UnsupportedParameter(f"This server cannot honour {name!r} here; leave it out.", param=name)


def _conversation(body: CountTokensRequest) -> dict[str, Any]:
    """What the prompt is made of: turns, tools, and how the last turn goes on."""
    turns: list[Turn] = []
    if body.system:
        turns.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        turns.extend(_turns(message, f"messages.{number}"))
    fields: dict[str, Any] = {"messages": turns, "model": body.model, **_tools(body)}
    if turns[-1]["role"] == "assistant":
        if "tool_calls" in turns[-1]:
            raise InvalidParameter("The last turn's tool_use blocks need tool_result blocks.", param="messages")
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return {name: value for name, value in fields.items() if value is not None}


def _turns(message: MessageParam, path: str) -> Iterator[Turn]:
    content = message.content
    if isinstance(content, str):
        yield {"role": message.role, "content": content}
        return
    if message.role == "assistant":
        yield _assistant_turn(content, path)
        return
    texts: list[str] = []
    for number, block in enumerate(content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if texts:
                    yield _user_turn(texts)
                    texts = []
                result = _text(block.content or "", f"{path}.content.{number}.content")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
            case _:
                raise _refused(block, f"{path}.content.{number}")
    if texts or not content:
        yield _user_turn(texts)


def _user_turn(texts: list[str]) -> Turn:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def _assistant_turn(blocks: tuple[Any, ...], path: str) -> Turn:
    texts, calls = [], []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append({"type": "text", "text": block.text})
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append({"id": block.id, "function": {"name": block.name, "arguments": arguments}})
            case _:
                raise _refused(block, f"{path}.content.{number}")
    return {"role": "assistant", "content": texts, **({"tool_calls": calls} if calls else {})}


def _text(content: str | tuple[ResultBlock, ...], path: str) -> Any:
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if not isinstance(block, TextBlock):
            raise _refused(block, f"{path}.{number}")
    return [{"type": "text", "text": block.text} for block in content if isinstance(block, TextBlock)]


def _refused(block: ToolUseBlock | ToolResultBlock | OtherBlock, path: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{path}: a block of type {block.type[:64]!r} cannot be taken here; this server takes text.", param=path
    )


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    for number, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise UnsupportedParameter(
                f"tools.{number}.type: tools of type {tool.type[:64]!r} do not run here.", param=f"tools.{number}.type"
            )
    choice = body.tool_choice
    if choice is None or not body.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise InvalidParameter("tool_choice needs tools.", param="tool_choice")
        return {"tools": _functions(body)} if body.tools else {}
    if choice.type == "tool" and not choice.name:
        raise InvalidParameter("tool_choice of type 'tool' needs the tool's name.", param="tool_choice.name")
    kinds: dict[str, Any] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.name}},
    }
    parallel = False if choice.disable_parallel_tool_use else None
    return {"tools": _functions(body), "tool_choice": kinds[choice.type], "parallel_tool_calls": parallel}


def _functions(body: CountTokensRequest) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in body.tools or ()
    ]


def _response_format(body: MessagesRequest) -> dict[str, Any] | None:
    config = body.output_config
    if config is None:
        return None
    if config.effort is not None:
        raise UnsupportedParameter(
            "output_config.effort: this server cannot choose an effort.", param="output_config.effort"
        )
    if config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": config.format.json_schema}}
