"""One request's output on its way from tokens to chunks of the log. Pure: no clock, no bus.

Tokens come in by number, so repeated ones are skipped and missing ones are noticed. What came since the last chunk is
coalesced into the next one, within a bound, so that a chunk always fits into a message. The pieces depend on timing;
their concatenation depends on the tokens alone.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from schemas.errors import ErrorBody
from schemas.generation import OutputSpec
from schemas.output import ChoiceDelta, NewTokens, OutputChunk, TokenText, ToolCallDelta, Usage
from schemas.step import TokenLogprob
from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.stop_strings import StopStrings
from services.tokenizer.tool_calls import Read, ToolCallReader
from services.tokenizer.vocabulary import Vocabulary

MAX_CHUNK_TOKENS = 128
"""With more tokens waiting, of one choice or of all, the rest goes into the next chunk. A token takes some 100 bytes as
text, and 3 kB with the most logprobs."""


class TokensMissing(Exception):
    """Tokens before these never came."""


class TokensUnsound(Exception):
    """These tokens contradict themselves or the request: they are not from a scheduler that works."""


@dataclass(slots=True)
class _Pending:
    """What one of the next chunks will say of one choice."""

    start: int
    token_ids: list[int] = field(default_factory=list)
    prompt: tuple[TokenText, ...] = ()
    text: str = ""
    logprobs: list[TokenText] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | int | None = None
    embedding: str | None = None


class ChoiceOutput:
    """One choice: its text so far, and what is not in a chunk yet."""

    def __init__(self, index: int, spec: OutputSpec, vocabulary: Vocabulary, stops: StopStrings) -> None:
        self.index = index
        self.num_tokens = 0
        self.is_finished = False
        self._spec = spec
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=spec.skip_special_tokens)
        self._matcher = stops.matcher()
        self._calls = ToolCallReader(spec.request_id, index) if spec.reads_tool_calls else None
        self._pending: deque[_Pending] = deque()
        self._has_begun = False
        self._num_prompt_said = 0
        self._echo = "".join(map(self._detokenizer.feed, spec.prompt_token_ids if spec.echo else ()))

    def feed(self, new: NewTokens) -> bool:
        """Take tokens; True when a stop string ended the choice, now or before. Raises TokensMissing after a gap."""
        if self.is_finished:
            return self._matcher.matched is not None
        if new.start > self.num_tokens:
            raise TokensMissing
        self._begin(new.prompt_logprobs)
        for offset in range(self.num_tokens - new.start, len(new.token_ids)):
            is_stop_token = new.stop_token and offset == len(new.token_ids) - 1
            self._take(new.token_ids[offset], new.logprobs[offset] if new.logprobs else None, is_stop_token)
            if self._matcher.matched is not None:
                self._finish("stop", self._matcher.matched)
                return True
        if new.finish_reason in ("stop", "length"):
            self._end(new)
        return False

    def _begin(self, prompt_logprobs: tuple[TokenLogprob, ...]) -> None:
        """Say the prompt first, if that is wanted and has not been done."""
        if self._has_begun or not self._spec.prompt_token_ids:
            return
        self._has_begun = True
        texts = self._prompt_texts(prompt_logprobs)[self._num_prompt_said :] if self._spec.prompt_logprobs else []
        for begin in range(0, len(texts), MAX_CHUNK_TOKENS):
            self._pending.append(_Pending(start=0, prompt=tuple(texts[begin : begin + MAX_CHUNK_TOKENS])))
        if self._spec.echo and not self._num_prompt_said:
            if not self._pending:
                self._pending.append(_Pending(start=0))
            self._pending[0].text = self._echo

    def _prompt_texts(self, logprobs: tuple[TokenLogprob, ...]) -> list[TokenText]:
        first, *others = self._spec.prompt_token_ids
        known = zip(others, logprobs, strict=False)
        return [self._alone(first, None), *(self._token_text(token_id, logprob) for token_id, logprob in known)]

    def _take(self, token_id: int, logprob: TokenLogprob | None, is_stop_token: bool) -> None:
        if self._pending and len(self._pending[-1].token_ids) >= MAX_CHUNK_TOKENS:
            self._pending.append(_Pending(start=self.num_tokens))
        pending = self._open()
        self.num_tokens += 1
        if self._spec.prompt_only:
            return
        pending.token_ids.append(token_id)
        if is_stop_token and not self._spec.include_stop:
            if self._spec.echo and logprob is not None:  # evaluation harnesses count an entry for every token
                pending.logprobs.append(self._without_text(token_id, logprob))
            return  # otherwise neither text nor logprob: the tokens that logprobs show join to the text
        if logprob is not None:
            pending.logprobs.append(self._token_text(token_id, logprob))
        text = self._detokenizer.feed(token_id)
        is_early = self.num_tokens <= self._spec.min_tokens
        self._say(pending, text if is_early else self._matcher.feed(text, include_stop=self._spec.include_stop))

    def _say(self, pending: _Pending, text: str) -> None:
        """Add text that is certain; where calls may be in it, tell them from content."""
        if self._calls is None:
            pending.text += text
        else:
            self._add(pending, self._calls.feed(text))

    def _add(self, pending: _Pending, read: Read) -> None:
        pending.text += read.content
        pending.calls += read.calls

    def _end(self, new: NewTokens) -> None:
        """The executor ended the choice: show what was held back, and say why it ended."""
        pending = self._open()
        if new.embedding is not None:
            pending.embedding = new.embedding
            self._finish("stop", None)
            return
        if self._spec.prompt_only:
            self._finish("length", None)
            return
        self._say(pending, self._matcher.feed(self._detokenizer.flush(), include_stop=self._spec.include_stop))
        if self._matcher.matched is not None:
            self._finish("stop", self._matcher.matched)
            return
        self._say(pending, self._matcher.flush())
        last = new.token_ids[-1] if new.stop_token and new.token_ids else None
        is_own_end = last is None or last in self._vocabulary.end_token_ids
        self._finish("length" if new.finish_reason == "length" else "stop", None if is_own_end else last)

    def _finish(self, reason: Literal["stop", "length"], stop_reason: str | int | None) -> None:
        pending = self._open()
        pending.finish_reason, pending.stop_reason = reason, stop_reason
        if self._calls is not None:
            self._add(pending, self._calls.flush())
            if reason == "stop" and self._calls.num_calls:
                pending.finish_reason = "tool_calls"
        self.is_finished = True

    def _open(self) -> _Pending:
        if not self._pending:
            self._pending.append(_Pending(start=self.num_tokens))
        return self._pending[-1]

    def _token_text(self, token_id: int, logprob: TokenLogprob) -> TokenText:
        top = tuple(self._alone(other, value) for other, value in logprob.top)
        return self._alone(token_id, logprob.logprob).model_copy(update={"top": top})

    def _without_text(self, token_id: int, logprob: TokenLogprob) -> TokenText:
        return self._token_text(token_id, logprob).model_copy(update={"token": "", "token_bytes": ()})

    def _alone(self, token_id: int, logprob: float | None) -> TokenText:
        raw = self._vocabulary.token_bytes[token_id] if token_id < self._vocabulary.size else b""
        return TokenText(
            token_id=token_id, token=raw.decode("utf-8", "replace"), token_bytes=tuple(raw), logprob=logprob
        )

    @property
    def has_more(self) -> bool:
        """Tell whether there is something that no chunk has said yet."""
        return bool(self._pending)

    def take(self) -> ChoiceDelta | None:
        """Return, once, what came since the last chunk, or the first part of much."""
        if not self._pending:
            return None
        pending = self._pending.popleft()
        return ChoiceDelta(
            index=self.index,
            start=pending.start,
            token_ids=tuple(pending.token_ids),
            prompt=pending.prompt,
            text=pending.text,
            tool_calls=tuple(pending.calls),
            logprobs=tuple(pending.logprobs) if self._spec.num_logprobs is not None else None,
            finish_reason=pending.finish_reason,
            stop_reason=pending.stop_reason,
            embedding=pending.embedding,
        )

    def restore(self, deltas: list[ChoiceDelta]) -> None:
        """Go on behind what the log holds: the text state follows from the tokens alone."""
        self._num_prompt_said = sum(len(delta.prompt) for delta in deltas)
        self._has_begun = any(delta.token_ids or delta.finish_reason for delta in deltas)
        for delta in deltas:
            self.num_tokens = max(self.num_tokens, delta.start)  # a log at its size limit has lost its beginning
            for token_id in delta.token_ids[self.num_tokens - delta.start :]:
                self._take(token_id, None, is_stop_token=False)
            self.is_finished |= delta.finish_reason is not None
        self._pending.clear()


class RequestOutput:
    """All choices of one request, and the position of its log."""

    def __init__(self, spec: OutputSpec, epoch: int, vocabulary: Vocabulary) -> None:
        self.spec = spec
        self.epoch = epoch
        self.log_sequence = 0
        self.is_final = False
        self._error: ErrorBody | None = None
        self._num_cached = 0
        stops = StopStrings(spec.stop)
        self._choices = [ChoiceOutput(index, spec, vocabulary, stops) for index in range(spec.n)]

    @property
    def num_completion_tokens(self) -> int:
        """Generated tokens over all choices."""
        return 0 if self.spec.prompt_only else sum(choice.num_tokens for choice in self._choices)

    def num_tokens(self, index: int) -> int:
        """Generated tokens of one choice."""
        return self._choices[index].num_tokens

    def feed(self, new: NewTokens) -> bool:
        """Take tokens of one choice; True when a stop string has ended it. Raises TokensMissing, TokensUnsound.

        What was cached counts as it was at a choice's first token: later it would be what the request itself put there.
        """
        if not (0 <= new.index < len(self._choices) and new.start >= 0 and min(new.token_ids, default=0) >= 0):
            raise TokensUnsound
        if new.logprobs and len(new.logprobs) != len(new.token_ids):
            raise TokensUnsound
        choice = self._choices[new.index]
        if choice.num_tokens == 0:
            self._num_cached = max(self._num_cached, new.num_cached)
        return choice.feed(new)

    def fail(self, error: ErrorBody) -> None:
        """End the request with an error, unless it has ended."""
        self._error = error

    def give_up(self, error: ErrorBody) -> OutputChunk:
        """Return the final chunk of an output that cannot go on; what waits is dropped."""
        self.is_final = True
        return self.chunk(final=True, error=error)

    @property
    def is_ending(self) -> bool:
        """Tell whether nothing but the end is to come."""
        return self._error is not None or all(choice.is_finished for choice in self._choices)

    @property
    def has_more(self) -> bool:
        """Tell whether there is something that no chunk has said yet."""
        return any(choice.has_more for choice in self._choices)

    def take_chunk(self) -> OutputChunk | None:
        """Return, once, the next chunk of the log; None when there is nothing to say."""
        if self.is_final:
            return None
        deltas = self._take_deltas()
        is_done = all(choice.is_finished for choice in self._choices)
        has_more = any(choice.has_more for choice in self._choices)
        self.is_final = not has_more and (is_done or self._error is not None)
        if not deltas and not self.is_final:
            return None
        return self.chunk(deltas, final=self.is_final, error=self._error if self.is_final and not is_done else None)

    def _take_deltas(self) -> tuple[ChoiceDelta, ...]:
        deltas: list[ChoiceDelta] = []
        room = MAX_CHUNK_TOKENS
        for choice in self._choices:
            if room > 0 and (delta := choice.take()) is not None:
                deltas.append(delta)
                room -= len(delta.token_ids) + len(delta.prompt)
        return tuple(deltas)

    def chunk(
        self, deltas: tuple[ChoiceDelta, ...] = (), *, final: bool = False, error: ErrorBody | None = None
    ) -> OutputChunk:
        """Return a chunk by this writer; usage goes into every chunk, so that a client may follow it."""
        spec = self.spec
        return OutputChunk(
            request_id=spec.request_id,
            model=spec.model,
            created_s=spec.created_s,
            epoch=self.epoch,
            choices=deltas,
            final=final,
            usage=Usage(
                prompt_tokens=spec.num_prompt_tokens,
                completion_tokens=self.num_completion_tokens,
                cached_tokens=self._num_cached,
            ),
            error=error,
            request_digest=spec.request_digest,
        )

    def restore(self, chunks: list[OutputChunk]) -> None:
        """Go on behind the chunks that the log holds."""
        for choice in self._choices:
            choice.restore([delta for chunk in chunks for delta in chunk.choices if delta.index == choice.index])
        self._num_cached = max((chunk.usage.cached_tokens for chunk in chunks if chunk.usage is not None), default=0)
        self.is_final = bool(chunks) and chunks[-1].final
