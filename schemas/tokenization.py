"""Text to tokens and back, as a service of its own: what a client may ask of a tokenizer without generating."""

from typing import ClassVar

from pydantic import ConfigDict, JsonValue

from schemas.codec import Message
from schemas.generation import ChatMessage
from schemas.tools import Tool


class TokenizeRequest(Message):
    """Encode exactly one of `prompt` and `messages`, as a generation would; `return_token_strs`: their texts too."""

    SCHEMA: ClassVar[str] = "tokenize_request"
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, JsonValue] | None = None
    tools: tuple[Tool, ...] | None = None
    return_token_strs: bool = False


class TokenizeReply(Message):
    """The tokens, and how many the model takes at most; `token_strs` are their texts, each decoded alone."""

    SCHEMA: ClassVar[str] = "tokenize_reply"

    count: int
    max_model_len: int
    tokens: tuple[int, ...] = ()
    token_strs: tuple[str, ...] | None = None


class DetokenizeRequest(Message):
    """Decode `tokens` to text, special tokens included."""

    SCHEMA: ClassVar[str] = "detokenize_request"
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: tuple[int, ...]


class DetokenizeReply(Message):
    """The text."""

    SCHEMA: ClassVar[str] = "detokenize_reply"

    prompt: str
