"""A conversation becomes what a chat template is given, and the template's text becomes a prompt. Pure.

Whoever renders the text is given: a process with limits, or this one for a template that is our own.

Content given as parts is joined with a newline; missing content (an assistant turn that only called tools) is empty.
"""

import json
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError
from pydantic import JsonValue

from schemas.errors import InvalidParameter
from schemas.generation import ChatMessage
from schemas.tools import Tool
from services.tokenizer.template_process import refused
from services.tokenizer.template_worker import RENDERING_ERRORS, compiled, rendered
from services.tokenizer.tool_format import OPEN, explain, signature

Render = Callable[[dict[str, Any]], str]

PART_SEPARATOR = "\n"
MAX_TEMPLATE_CHARS = 200_000
END_OF_MESSAGE = "\ue000end of message\ue001"
"""Put behind the content of a message that is to be continued, and found again in the prompt; content may recur."""


def rendering_here(source: str) -> Render:
    """Return what renders a template in this process, without limits; raises ValueError for wrong syntax."""
    try:
        template = compiled(source)
    except TemplateError as error:
        raise ValueError(f"the chat template has an error: {error}") from None

    def render(values: dict[str, Any]) -> str:
        try:
            return rendered(template, values)
        except RENDERING_ERRORS as error:
            raise refused(str(error)) from None

    return render


class ChatTemplate:
    """One template.

    `render` makes its text of the values that it is given, or raises InvalidParameter; without it, the template is
    rendered here.
    """

    def __init__(self, source: str, tokens: dict[str, str], render: Render | None = None) -> None:
        """Raise ValueError for a template that is too long, or has wrong syntax."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} may be")
        self._render = render or rendering_here(source)
        self._tokens = tokens
        self._explains_tools = "tools" in source and OPEN in source

    def render(
        self,
        messages: tuple[ChatMessage, ...],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: tuple[Tool, ...] = (),
        variables: dict[str, JsonValue] | None = None,
    ) -> str:
        """Return the prompt's text; raises InvalidParameter when the template refuses the conversation.

        `variables` are more values for the template; they do not replace its own.
        """
        conversation = [_as_dict(message) for message in messages]
        if not self._explains_tools:
            conversation = explain(conversation, tools)
        if continue_final_message:
            conversation[-1]["content"] += END_OF_MESSAGE
        values = {
            **(variables or {}),
            "messages": conversation,
            "add_generation_prompt": add_generation_prompt,
            "tools": [signature(tool) for tool in tools] if tools and self._explains_tools else None,
            **self._tokens,
        }
        text = self._render(values)
        return _cut_after_last_message(text) if continue_final_message else text


def _cut_after_last_message(text: str) -> str:
    """Leave the last message open, so that the model goes on with it."""
    end = text.rfind(END_OF_MESSAGE)
    if end < 0:
        raise InvalidParameter(
            "continue_final_message: the chat template changes the last message's text, so it cannot be continued.",
            param="continue_final_message",
        )
    return text[:end]


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    text = content if isinstance(content, str) else PART_SEPARATOR.join(part.text for part in content or ())
    fields = {**message.model_dump(exclude_none=True), "content": text}
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _parsed(call["function"]["arguments"])
    return fields


def _parsed(arguments: str) -> Any:
    """Templates write arguments as JSON, so they want them parsed; what is no JSON stays a text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
