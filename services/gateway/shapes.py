"""What the two OpenAI endpoints write differently: names, deltas, logprobs. Pure; frames.py and fold.py do the rest."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from schemas.output import TokenText, ToolCallDelta, Usage

JsonObject = dict[str, Any]


class Shape(Protocol):
    """One endpoint's way of writing an answer."""

    id_prefix: str
    object: str
    chunk_object: str
    prompt_is_shared: bool
    """Whether the prompt's logprobs stand beside the choices, not in each."""

    def opening(self) -> JsonObject | None:
        """Return what a choice's very first chunk says, before any text; None for nothing."""

    def delta(self, text: str, calls: Sequence[ToolCallDelta]) -> JsonObject:
        """Return the part of a streamed choice that carries text and what is new of tool calls."""

    def whole(self, text: str, calls: Sequence[ToolCallDelta]) -> JsonObject:
        """Return the part of a finished choice that carries its text and its tool calls."""

    def logprobs(self, tokens: Sequence[TokenText], offset: int) -> JsonObject:
        """Return the logprobs of tokens that follow `offset` characters of token text."""


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_is_shared = True

    def opening(self) -> JsonObject | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str, calls: Sequence[ToolCallDelta]) -> JsonObject:
        fields: JsonObject = {"content": text} if text else {}
        if calls:
            fields["tool_calls"] = [_call_delta(call) for call in calls]
        return {"delta": fields}

    def whole(self, text: str, calls: Sequence[ToolCallDelta]) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_whole_call(call) for call in calls]}
        return {"message": message}

    def logprobs(self, tokens: Sequence[TokenText], offset: int) -> JsonObject:
        entries = [
            {**_chat_token(token), "top_logprobs": [_chat_token(other) for other in token.top]} for token in tokens
        ]
        return {"content": entries, "refusal": None}


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    prompt_is_shared = False

    def opening(self) -> JsonObject | None:
        return None

    def delta(self, text: str, calls: Sequence[ToolCallDelta]) -> JsonObject:
        return {"text": text}

    def whole(self, text: str, calls: Sequence[ToolCallDelta]) -> JsonObject:
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenText], offset: int) -> JsonObject:
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.token)
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": offsets,
            "bytes": [token.token_bytes for token in tokens],
        }


CHAT: Shape = ChatShape()
COMPLETION: Shape = CompletionShape()


def usage_object(usages: Iterable[Usage]) -> JsonObject:
    """Return the sum of several prompts' token counts, as OpenAI writes it."""
    counted = list(usages)
    prompt = sum(usage.prompt_tokens for usage in counted)
    completion = sum(usage.completion_tokens for usage in counted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in counted)},
    }


def _call_delta(call: ToolCallDelta) -> JsonObject:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


def _whole_call(call: ToolCallDelta) -> JsonObject:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_token(token: TokenText) -> JsonObject:
    return {"token": token.token, "logprob": token.logprob, "bytes": token.token_bytes}


def prompt_logprobs(tokens: Sequence[TokenText]) -> list[JsonObject | None]:
    """Return, per prompt token, the logprobs of itself and of the likeliest ones by token id; None for the first."""
    return [_by_id(token) if token.logprob is not None else None for token in tokens]


def _by_id(token: TokenText) -> JsonObject:
    ranked = {other.token_id: rank for rank, other in enumerate(token.top, start=1)}
    return {
        str(other.token_id): {
            "logprob": other.logprob,
            "rank": ranked.get(other.token_id),
            "decoded_token": other.token,
        }
        for other in (token, *token.top)
    }


def _likeliest(token: TokenText) -> dict[str, float] | None:
    """The alternatives by their text, the sampled token among them; of two with the same text the likelier one."""
    by_text: dict[str, float] = {}
    known = {other.token_id for other in token.top}
    for other in (*token.top, token):
        if other.logprob is not None and (other is not token or token.token_id not in known):
            by_text.setdefault(other.token, other.logprob)
    return by_text or None
