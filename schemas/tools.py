"""Tools that a model may call, with OpenAI's names: what a client offers, and what a model calls."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from schemas.codec import Part

MAX_TOOLS = 128
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"


class ToolFunction(Part):
    """A function; `parameters` is the JSON schema of its arguments, which are one object."""

    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(pattern=TOOL_NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Part):
    """One tool."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: ToolFunction


class ToolName(Part):
    """The name of a function."""

    model_config = ConfigDict(strict=True)

    name: str


class NamedTool(Part):
    """The one tool that must be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"] = "function"
    function: ToolName


class CalledFunction(Part):
    """What was called; `arguments` is JSON as text."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str


class ToolCall(Part):
    """One call in an assistant's message."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
