"""Every output that this tokenizer writes: takes token batches, keeps one flush task per request. An edge module.

Token batches change state at once and in order; each request's task appends what has come, one chunk at a time, so that
a chunk holds whatever arrived while the one before was being stored. Of many outputs, each waits a little for more:
what an append costs, here and in all processes behind it, does not depend on how much is in it.
"""

import asyncio
import logging
import math
import time
from collections.abc import Coroutine
from dataclasses import dataclass

from schemas.errors import NatterjackError
from schemas.output import Feedback, NewTokens, OpenOutput, OutputChunk, OutputFeedback, RequestFailed, TokenBatch
from services.runtime.bus import Bus
from services.runtime.metrics import Metrics
from services.runtime.request_meter import RequestTimes
from services.runtime.telemetry import Tracing, event
from services.tokenizer.log_writer import Fenced, LogWriter
from services.tokenizer.meters import OutputMeters
from services.tokenizer.request_output import RequestOutput, TokensMissing, TokensUnsound
from services.tokenizer.vocabulary import Vocabulary

log = logging.getLogger(__name__)

FEW_OUTPUTS = 8
"""So many never wait."""
APPENDS_PER_S = 500
"""What the waiting aims at."""
DOUBTFUL_S = 1.0
"""A writer that was away for so long may have been replaced between storing a chunk and telling the client."""
IDLE_S = 5.0
"""An output without news for so long may have another writer by now, which nobody had to tell this one."""


@dataclass(slots=True)
class _Writing:
    """One request being written; `waiting` holds news that came before the log was read, `opened_s` is Unix time."""

    output: RequestOutput
    writer: LogWriter
    scheduler: str
    traceparent: str | None
    is_resumed: bool
    opened_s: float
    times: RequestTimes | None
    waiting: list[NewTokens | RequestFailed] | None = None
    task: asyncio.Task[None] | None = None
    heard_s: float = 0.0
    appended_s: float = -math.inf
    due: asyncio.TimerHandle | None = None

    def stop_waiting(self) -> None:
        """Forget when the next chunk is due."""
        if self.due is not None:
            self.due.cancel()
            self.due = None


class Outputs:
    """The outputs of one tokenizer instance, by request."""

    def __init__(
        self,
        bus: Bus,
        tracing: Tracing,
        tokenizer: str,
        vocabulary: Vocabulary,
        metrics: Metrics | None = None,
        *,
        max_wait_s: float = 0.0,
    ) -> None:
        self._bus = bus
        self._max_wait_s = max_wait_s
        self._meters = OutputMeters(metrics or Metrics(), lambda: len(self._writing))
        self._tracing = tracing
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._writing: dict[str, _Writing] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._writing)

    # ---- news from the scheduler

    def apply(self, batch: TokenBatch) -> None:
        """Take one batch: opened outputs first, then tokens, then failures."""
        touched: dict[str, _Writing] = {}
        started_s = time.perf_counter()
        for opened in batch.opened:
            self._open(opened, batch.scheduler)
        news_items: list[NewTokens | RequestFailed] = [*batch.tokens, *batch.failed]
        for news in news_items:
            writing = self._writing.get(news.request_id)
            if writing is None or writing.output.epoch < news.epoch:
                self._tell(batch.scheduler, news.request_id, news.epoch, "lost")
            elif writing.output.epoch == news.epoch:
                if writing.waiting is not None:
                    writing.waiting.append(news)
                else:
                    self._take(writing, news)
                    touched[news.request_id] = writing
            else:
                self._tell(batch.scheduler, news.request_id, news.epoch, "fenced")
        self._meters.decoded(started_s)
        for writing in touched.values():
            writing.heard_s = started_s
            self._flush_soon(writing)

    def _open(self, opened: OpenOutput, scheduler: str) -> None:
        spec = opened.spec
        previous = self._writing.get(spec.request_id)
        if previous is not None:
            if previous.output.epoch >= opened.epoch:
                return
            self._close(previous)
        output = RequestOutput(spec, opened.epoch, self._vocabulary)
        times = self._meters.opened(spec, opened.resume)
        log_writer = LogWriter(self._bus, output)
        writing = _Writing(output, log_writer, scheduler, spec.traceparent, opened.resume, time.time(), times)
        writing.heard_s = time.perf_counter()
        self._writing[spec.request_id] = writing
        if opened.resume:
            writing.waiting = []
            writing.task = self._spawn(self._resume(writing))

    def _trace(self, writing: _Writing) -> None:
        """Show the output as a span from its opening until now; one that another writer had before says so."""
        output, spec = writing.output, writing.output.spec
        parent, writing.traceparent = writing.traceparent, None  # once
        if parent is None:
            return
        taken_over = event("natterjack.output_taken_over", writing.opened_s, {"natterjack.epoch": output.epoch})
        self._tracing.record(
            "tokenizer.detokenize",
            parent=parent,
            start_s=writing.opened_s,
            attributes={
                "natterjack.request_id": spec.request_id,
                "natterjack.epoch": output.epoch,
                "gen_ai.usage.output_tokens": output.num_completion_tokens,
            },
            events=(taken_over,) if writing.is_resumed else (),
        )

    def _take(self, writing: _Writing, news: NewTokens | RequestFailed) -> None:
        output = writing.output
        if isinstance(news, RequestFailed):
            output.fail(news.error)
            return
        try:
            if output.feed(news):
                num_tokens = output.num_tokens(news.index)
                self._tell(
                    writing.scheduler, news.request_id, news.epoch, "stopped", index=news.index, num_tokens=num_tokens
                )
        except TokensMissing:
            log.warning("tokens are missing before %d", news.start, extra={"request_id": news.request_id})
            self._tell(writing.scheduler, news.request_id, news.epoch, "lost")
        except TokensUnsound:
            log.error("ignored unsound tokens from %s", writing.scheduler, extra={"request_id": news.request_id})

    # ---- chunks to the log

    def _flush_soon(self, writing: _Writing) -> None:
        if writing.task is not None and not writing.task.done():
            return  # it looks again when its append is stored
        wait_s = self._wait_s(writing)
        if wait_s <= 0:
            self._flush_now(writing)
        elif writing.due is None:
            writing.due = asyncio.get_running_loop().call_later(wait_s, self._flush_now, writing)

    def _flush_now(self, writing: _Writing) -> None:
        writing.stop_waiting()
        if writing.task is None or writing.task.done():
            writing.task = self._spawn(self._flush(writing))

    def _wait_s(self, writing: _Writing) -> float:
        """Return how long the next chunk waits for more: the first one and the last one never do."""
        if len(self._writing) <= FEW_OUTPUTS or writing.output.is_ending:
            return 0.0
        spacing_s = min(self._max_wait_s, len(self._writing) / APPENDS_PER_S)
        return writing.appended_s + spacing_s - time.perf_counter()

    async def _resume(self, writing: _Writing) -> None:
        try:
            newest = await writing.writer.take_over()
        except Fenced:
            self._end(writing, "fenced")
            return
        waiting, writing.waiting = writing.waiting or [], None
        if newest is not None:
            await self._reply(writing.output, newest)  # its writer may have died before it did
        if newest is not None and newest.final:
            self._end(writing, "stored")
            return
        for news in waiting:
            self._take(writing, news)
        await self._flush(writing)

    async def _flush(self, writing: _Writing) -> None:
        output = writing.output
        try:
            while (chunk := output.take_chunk()) is not None:
                started_s = time.perf_counter()
                chunk = await writing.writer.append(chunk)
                self._meters.appended(chunk, started_s, writing.times)
                await self._check_still_ours(writing, started_s)
                await self._reply(output, chunk)
                if chunk.final:
                    self._end(writing, "stored")
                    return
                writing.appended_s = started_s
                if (wait_s := self._wait_s(writing)) > 0 and output.has_more:
                    writing.due = asyncio.get_running_loop().call_later(wait_s, self._flush_now, writing)
                if wait_s > 0:
                    return
        except Fenced:
            log.warning("another writer has the log", extra={"request_id": output.spec.request_id})
            self._end(writing, "fenced")

    async def _check_still_ours(self, writing: _Writing, since_s: float) -> None:
        """Raise Fenced when another writer took over while this process slept: its reply would come out of order."""
        is_doubtful = writing.output.spec.reply is not None and time.perf_counter() - since_s > DOUBTFUL_S
        if is_doubtful and await writing.writer.is_replaced():
            raise Fenced

    async def _reply(self, output: RequestOutput, chunk: OutputChunk) -> None:
        """Send the chunk to a client that asked over NATS, if one did."""
        if output.spec.reply is None:
            return
        try:
            await self._bus.publish(output.spec.reply, chunk)
        except NatterjackError as error:  # the log has it; the client can read it there
            log.warning("a reply was lost: %s", error.message, extra={"request_id": chunk.request_id})

    async def sweep(self) -> None:
        """Let go of outputs that have had no news for long and are another writer's by now."""
        now_s = time.perf_counter()
        for writing in list(self._writing.values()):
            is_busy = writing.task is not None and not writing.task.done()
            if is_busy or now_s - writing.heard_s < IDLE_S:
                continue
            writing.heard_s = now_s
            if await writing.writer.is_replaced() and self._writing.get(writing.output.spec.request_id) is writing:
                self._end(writing, "fenced")

    def _end(self, writing: _Writing, event: str) -> None:
        output = writing.output
        request_id = output.spec.request_id
        writing.stop_waiting()
        self._meters.ended(event, writing.times)
        if self._writing.get(request_id) is writing:
            del self._writing[request_id]
        self._trace(writing)
        self._tell(writing.scheduler, request_id, output.epoch, "stored" if event == "stored" else "fenced")

    def _close(self, writing: _Writing) -> None:
        """Make way for a later epoch of the same request."""
        self._meters.ended("replaced", writing.times)
        writing.stop_waiting()
        if writing.task is not None:
            writing.task.cancel()
        self._trace(writing)

    # ---- feedback

    def _tell(
        self, scheduler: str, request_id: str, epoch: int, event: str, *, index: int = 0, num_tokens: int = 0
    ) -> None:
        item = Feedback.model_validate(
            {"request_id": request_id, "epoch": epoch, "event": event, "index": index, "num_tokens": num_tokens}
        )
        self._spawn(self._publish_feedback(scheduler, item))

    async def _publish_feedback(self, scheduler: str, item: Feedback) -> None:
        subject = self._bus.subjects.feedback(scheduler)
        try:
            await self._bus.publish(subject, OutputFeedback(tokenizer=self._tokenizer, items=(item,)))
        except NatterjackError as error:  # the scheduler asks again when it hears nothing
            log.warning("feedback was lost: %s", error.message, extra={"request_id": item.request_id})

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self, timeout_s: float) -> None:
        """Wait until everything received so far has been stored."""
        deadline = time.monotonic() + timeout_s
        self._max_wait_s = 0.0
        for writing in list(self._writing.values()):
            if writing.due is not None:
                self._flush_now(writing)
        while self._tasks and (remaining := deadline - time.monotonic()) > 0:
            await asyncio.wait(set(self._tasks), timeout=remaining)

    def close(self) -> None:
        """Cancel what is left."""
        for writing in self._writing.values():
            writing.stop_waiting()
        for task in self._tasks:
            task.cancel()
