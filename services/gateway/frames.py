"""Output chunks become server-sent events. Pure: one object per HTTP response, bytes out.

Built from plain dictionaries and encoded once: this runs for every chunk of every stream.
"""

from collections.abc import Sequence

from schemas.errors import ErrorBody
from schemas.output import ChoiceDelta, OutputChunk
from services.gateway.answer import Answer
from services.gateway.error_shape import error_object
from services.gateway.events import KEEP_ALIVE, data_event, with_id
from services.gateway.resumption import event_id
from services.gateway.shapes import JsonObject, usage_object

DONE = b"data: [DONE]\n\n"


class EventFrames:
    """The events of one streamed answer, in order.

    An event's id is `<answer id>/<chunks written, per prompt>`: from it any gateway can tell where the client stands.
    It is written with the last event of a chunk, so that a position never lies inside one; a client may have chosen the
    answer's id, which is therefore percent-encoded. The first `read` chunks of each prompt are known to the client, and
    give no events. `usages` holds each prompt's token counts, once they are known.
    """

    def __init__(self, answer: Answer, read: Sequence[int] = ()) -> None:
        self._answer = answer
        self._read = read or [0] * answer.num_prompts
        self._head = answer.head(answer.shape.chunk_object)
        self._opened: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._positions = [0] * answer.num_prompts
        self._num_tokens = [0] * answer.num_prompts
        self.usages = answer.first_usages()

    def begin(self) -> bytes:
        """Write nothing yet: a request that fails before its first chunk gets a real status."""
        return b""

    def chunk(self, prompt: int, chunk: OutputChunk) -> bytes:
        """Return the events of one chunk of prompt number `prompt`: none if it adds nothing that a client sees."""
        if chunk.usage is not None:
            self.usages[prompt] = chunk.usage
        events: list[bytes] = []
        for delta in chunk.choices:
            self._num_tokens[prompt] += len(delta.token_ids)
            events.extend(self._choice_events(self._answer.index(prompt, delta.index), delta))
        self._positions[prompt] += 1
        if self._positions[prompt] <= self._read[prompt]:
            return b""
        return with_id(events, event_id(self._answer.id, self._positions))

    def end(self) -> bytes:
        """Return what follows the last chunk."""
        if not self._answer.include_usage:
            return DONE
        return data_event({**self._head, "choices": [], "usage": usage_object(self.usages)}) + DONE

    def failure(self, error: ErrorBody) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        return data_event(error_object(error)) + DONE

    def keep_alive(self) -> bytes:
        """Return what is written in a long silence."""
        return KEEP_ALIVE

    def _choice_events(self, index: int, delta: ChoiceDelta) -> list[bytes]:
        events = self._opening(index)
        has_text = delta.text or delta.logprobs or delta.prompt or delta.tool_calls
        if has_text or delta.finish_reason or self._answer.token_ids:
            events.append(self._object(self._choice(index, delta)))
        return events

    def _choice(self, index: int, delta: ChoiceDelta) -> JsonObject:
        added = self._answer.shape.delta(delta.text, delta.tool_calls)
        choice: JsonObject = {"index": index, **added, "logprobs": None}
        shown = (*(delta.prompt if self._answer.echo else ()), *(delta.logprobs or ()))
        if shown:
            offset = self._offsets.get(index, 0)
            choice["logprobs"] = self._answer.shape.logprobs(shown, offset)
            self._offsets[index] = offset + sum(len(token.token) for token in shown)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._answer.token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _opening(self, index: int) -> list[bytes]:
        if index in self._opened:
            return []
        self._opened.add(index)
        opening = self._answer.shape.opening()
        if opening is None:
            return []
        return [self._object({"index": index, **opening, "logprobs": None, "finish_reason": None})]

    def _object(self, choice: JsonObject) -> bytes:
        fields = {**self._head, "choices": [choice]}
        if self._answer.include_usage:
            fields["usage"] = self._usage_so_far() if self._answer.continuous_usage else None
        return data_event(fields)

    def _usage_so_far(self) -> JsonObject:
        return usage_object(
            usage.model_copy(update={"completion_tokens": count})
            for usage, count in zip(self.usages, self._num_tokens, strict=True)
        )
