"""What the tokenizers have to hear: collects one step's news into one batch per tokenizer. Pure.

A request's output is opened at its first news; then every known token is sent, so opening again (after a loss, or at
another tokenizer) needs nothing but the request itself.
"""

from dataclasses import dataclass, field

from schemas.output import NewTokens, OpenOutput, RequestFailed, TokenBatch
from services.scheduler.executor_state import Progress
from services.scheduler.requests import Request, Sequence

MAX_PIECE_TOKENS = 512
"""Longer news of one choice comes in pieces."""
TOKEN_BYTES, LOGPROB_BYTES, NEWS_BYTES = 12, 32, 512
"""What a token, one log-probability and everything else of an item take at most, as text."""


@dataclass(slots=True)
class _Batch:
    opened: list[OpenOutput] = field(default_factory=list)
    tokens: list[NewTokens] = field(default_factory=list)
    failed: list[RequestFailed] = field(default_factory=list)

    def add(self, item: OpenOutput | NewTokens | RequestFailed) -> None:
        """Put an item where its kind belongs."""
        match item:
            case OpenOutput():
                self.opened.append(item)
            case NewTokens():
                self.tokens.append(item)
            case RequestFailed():
                self.failed.append(item)

    def items(self) -> list[OpenOutput | NewTokens | RequestFailed]:
        """Return everything in the order in which a tokenizer takes it."""
        return [*self.opened, *self.tokens, *self.failed]


class Outbox:
    """News not yet sent, by tokenizer."""

    def __init__(self, scheduler: str, max_batch_bytes: int = 1 << 19) -> None:
        self._scheduler = scheduler
        self._max_batch_bytes = max_batch_bytes
        self._batches: dict[str, _Batch] = {}

    def add(self, progress: Progress) -> None:
        """Add one token, or an end."""
        request = progress.sequence.request
        if request.is_open:
            self._batch(request).tokens.append(_increment(progress))
        else:
            self.open(request)

    def open(self, request: Request) -> None:
        """Tell the request's tokenizer to write, with everything known so far."""
        batch = self._batch(request)
        batch.opened.append(
            OpenOutput(spec=request.work.output, epoch=request.epoch, resume=request.is_resumed or request.epoch > 1)
        )
        request.is_open = True
        for sequence in request.sequences:
            if _has_news(sequence):
                batch.tokens += _pieces(_everything(sequence))
        if request.error is not None:
            self._add_failure(request)

    def fail(self, request: Request) -> None:
        """Tell that the request as a whole has failed, with its `error`."""
        if request.is_open:
            self._add_failure(request)
        else:
            self.open(request)

    def reopen(self, request: Request) -> None:
        """Begin a new writer's epoch, at the same tokenizer or another one."""
        if request.is_open:
            self.close(request)
        self.open(request)

    def close(self, request: Request) -> None:
        """Trust the writer of this epoch no longer; the next news opens the output again, in a higher one."""
        request.epoch += 1
        request.is_open = False

    def _add_failure(self, request: Request) -> None:
        if request.error is not None:
            failure = RequestFailed(request_id=request.work.request_id, epoch=request.epoch, error=request.error.body())
            self._batch(request).failed.append(failure)

    def _batch(self, request: Request) -> _Batch:
        return self._batches.setdefault(request.tokenizer, _Batch())

    def take(self) -> list[tuple[str, TokenBatch]]:
        """Return, once, what is to be sent in this order: (tokenizer, batch), none larger than a message may be."""
        batches, self._batches = self._batches, {}
        return [
            (
                tokenizer,
                TokenBatch(
                    scheduler=self._scheduler,
                    opened=tuple(part.opened),
                    tokens=tuple(part.tokens),
                    failed=tuple(part.failed),
                ),
            )
            for tokenizer, batch in batches.items()
            for part in self._parts(batch)
        ]

    def _parts(self, batch: _Batch) -> list[_Batch]:
        """Cut a batch where it would become too large for one message."""
        parts = [_Batch()]
        size_bytes = 0
        for item in batch.items():
            item_bytes = _size_bytes(item)
            if size_bytes and size_bytes + item_bytes > self._max_batch_bytes:
                parts.append(_Batch())
                size_bytes = 0
            parts[-1].add(item)
            size_bytes += item_bytes
        return parts


def _has_news(sequence: Sequence) -> bool:
    return sequence.num_generated > sequence.num_durable or sequence.finish_reason is not None


def _everything(sequence: Sequence) -> NewTokens:
    """Return all tokens beyond those that the log held when the request came."""
    start = sequence.num_durable
    tokens = sequence.tokens[sequence.prompt_len + start :]
    is_stop = sequence.finish_reason == "stop" and bool(tokens) and tokens[-1] in sequence.request.work.stop_token_ids
    return NewTokens(
        request_id=sequence.request.work.request_id,
        epoch=sequence.request.epoch,
        index=sequence.index,
        start=start,
        token_ids=tuple(tokens),
        logprobs=tuple(sequence.logprobs),
        finish_reason=sequence.finish_reason,
        stop_token=is_stop,
        num_cached=sequence.num_cached,
        prompt_logprobs=sequence.prompt_logprobs if start == 0 else (),
        embedding=sequence.embedding,
    )


def _pieces(news: NewTokens) -> list[NewTokens]:
    """Cut long news; only the last piece tells of the end."""
    total, size = len(news.token_ids), MAX_PIECE_TOKENS
    if total <= size:
        return [news]
    pieces = [
        news.model_copy(
            update={
                "start": news.start + begin,
                "token_ids": news.token_ids[begin : begin + size],
                "logprobs": news.logprobs[begin : begin + size],
                "finish_reason": None,
                "stop_token": False,
                "prompt_logprobs": news.prompt_logprobs if begin == 0 else (),
            }
        )
        for begin in range(0, total, size)
    ]
    end = {"finish_reason": news.finish_reason, "stop_token": news.stop_token}
    return [*pieces[:-1], pieces[-1].model_copy(update=end)]


def _size_bytes(item: OpenOutput | NewTokens | RequestFailed) -> int:
    """Estimate, from above, what an item takes in a message."""
    match item:
        case OpenOutput():
            return NEWS_BYTES + 6 * sum(map(len, item.spec.stop)) + TOKEN_BYTES * len(item.spec.prompt_token_ids)
        case NewTokens():
            num_logprobs = sum(1 + len(logprob.top) for logprob in (*item.logprobs, *item.prompt_logprobs))
            said_bytes = TOKEN_BYTES * len(item.token_ids) + LOGPROB_BYTES * num_logprobs
            return NEWS_BYTES + said_bytes + len(item.embedding or "")
        case RequestFailed():
            return NEWS_BYTES + 6 * len(item.error.message)


def _increment(progress: Progress) -> NewTokens:
    sequence = progress.sequence
    tokens = (progress.token, *progress.forced) if progress.token is not None else ()
    start = sequence.num_generated - len(tokens)
    return NewTokens(
        request_id=sequence.request.work.request_id,
        epoch=sequence.request.epoch,
        index=sequence.index,
        start=start,
        token_ids=tokens,
        logprobs=(progress.logprob,) if progress.logprob is not None else (),
        finish_reason=progress.finish_reason,
        stop_token=progress.stop_token,
        num_cached=sequence.num_cached,
        prompt_logprobs=sequence.prompt_logprobs if start == 0 else (),
        embedding=sequence.embedding,
    )
