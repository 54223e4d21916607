"""A Responses body becomes the request that the pipeline understands. Pure: knows neither HTTP nor the bus."""

from typing import Any

from schemas.errors import InvalidParameter, OutputNotFound, UnsupportedParameter
from schemas.responses import Item, ResponsesRequest, ResponseTool
from services.gateway.messages.translate import refuse_unsupported
from services.gateway.naming import EXTENSIONS, NOT_IN_ONE_ANSWER
from services.gateway.responses.items import check_items, items_of, turns_of
from services.gateway.translate import AnswerOptions, Translation, generate_request

ID_PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
}
"""Fields of the request that have another name in a body."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (1,) if name == "n" else (False,) for name in NOT_IN_ONE_ANSWER if name != "top_logprobs"},
    "access_programs": (),
    "background_options": ({}, {"completion_window": "soonest"}),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}
"""Known options that cannot be honoured, and the values of them that ask for nothing; null always does."""


def request_id_of(response_id: str, param: str | None = None) -> str:
    """Return the id that a response has in the log; raises OutputNotFound for what is no response's id."""
    request_id = response_id.removeprefix(ID_PREFIX)
    if not response_id.startswith(ID_PREFIX) or not 0 < len(request_id) <= 128:
        raise not_found(response_id, param)
    return request_id


def not_found(response_id: str, param: str | None = None) -> OutputNotFound:
    """Return the error for a response that is not there, or not any more."""
    return OutputNotFound(
        f"There is no response {response_id[:200]!r}: it was never stored, was deleted, or has expired "
        "(bus.out_max_age_s).",
        param=param,
    )


def translate_response(
    body: ResponsesRequest, before: tuple[Item, ...], default_model: str, default_id: str
) -> Translation:
    """Return the one request that a response asks for, after the items of the conversation before it."""
    extra = body.model_extra or {}
    refuse_unsupported(extra, NEUTRAL)
    if body.background and body.store is False:
        raise InvalidParameter("'background' needs 'store': the answer is read later.", param="background")
    items = items_of(body)
    check_items(items)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields = {
        "model": default_model,
        "request_id": default_id,
        **{name: value for name, value in extra.items() if name in EXTENSIONS},
        "messages": [*instructions, *turns_of((*before, *items))],
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": _num_logprobs(body),
        "response_format": _response_format(body),
        **_tools(body),
        "deliver": "log",
    }
    if body.model is not None:
        fields["model"] = body.model
    request = generate_request({name: value for name, value in fields.items() if value is not None})
    return Translation(request.request_id or "", (request,), AnswerOptions(stream=bool(body.stream)))


def _num_logprobs(body: ResponsesRequest) -> int | None:
    for wish in body.include or ():
        if wish != LOGPROBS:
            raise UnsupportedParameter(f"include: {wish[:100]!r} is not available here.", param="include")
    return body.top_logprobs or 0 if body.include or body.top_logprobs is not None else None


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    text = body.text
    if text is None:
        return None
    if text.verbosity not in (None, "medium"):
        raise UnsupportedParameter("text.verbosity: this server cannot choose it.", param="text.verbosity")
    if text.format is None or text.format.get("type") != "json_schema":
        return text.format
    described = {name: value for name, value in text.format.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": described}


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    """Tools, their choice, and whether several may be called; of `allowed_tools`, only those are shown."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise InvalidParameter("tool_choice needs tools.", param="tool_choice")
        return {}
    functions = [_function(tool, number) for number, tool in enumerate(body.tools)]
    choice: Any = body.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            functions, choice = _allowed(functions, choice)
        else:
            choice = _named(choice)
    return {"tools": functions, "tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}


def _function(tool: ResponseTool, number: int) -> dict[str, Any]:
    path = f"tools.{number}"
    if tool.type != "function":
        raise UnsupportedParameter(
            f"{path}.type: tools of type {tool.type[:64]!r} do not run here; functions do.", param=f"{path}.type"
        )
    if not tool.name:
        raise InvalidParameter(f"{path}.name: a function needs a name.", param=f"{path}.name")
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise UnsupportedParameter(
            "tool_choice: 'none', 'auto', 'required', a function's name or allowed_tools can be chosen here.",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _allowed(functions: list[dict[str, Any]], choice: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    wanted, mode = choice.get("tools"), choice.get("mode", "auto")
    if mode not in ("auto", "required") or not isinstance(wanted, list):
        raise InvalidParameter("tool_choice: allowed_tools needs a mode and tools.", param="tool_choice")
    names = {tool.get("name") for tool in wanted if isinstance(tool, dict)}
    allowed = [function for function in functions if function["function"]["name"] in names]
    if not allowed:
        raise InvalidParameter("tool_choice: none of the allowed tools is among the tools.", param="tool_choice")
    return allowed, mode
