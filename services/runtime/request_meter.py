"""Measures requests where their client is faced: counts, latencies and ends, from the chunks that pass.

Used by the gateway for HTTP and by the tokenizer for NATS clients, so that every request is measured once. Times are
seconds of any one clock that does not jump.
"""

from schemas.output import OutputChunk
from services.runtime.metrics import Metrics


class RequestMeter:
    """The request metrics of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.open: set[RequestTimes] = set()
        self.first_token = metrics.histogram("time_to_first_token_seconds")
        self.between_tokens = metrics.histogram("inter_token_latency_seconds")
        self.per_output_token = metrics.histogram("request_time_per_output_token_seconds")
        self.whole = metrics.histogram("e2e_request_latency_seconds")
        self.num_prompt_tokens = metrics.histogram("request_prompt_tokens")
        self.num_generated = metrics.histogram("request_generation_tokens")
        self.prompt_tokens = metrics.counter("prompt_tokens_total")
        self.generation_tokens = metrics.counter("generation_tokens_total")
        metrics.counter("request_success_total", "stop")
        metrics.gauge("num_requests_open", lambda: len(self.open))

    def begin(self, now_s: float, trace_id: str = "") -> "RequestTimes":
        """Note a request's arrival; `close` must follow, whatever happens. The trace explains its latencies."""
        times = RequestTimes(self, now_s, trace_id)
        self.open.add(times)
        return times


class RequestTimes:
    """One request from its arrival to its end."""

    __slots__ = (
        "_first_s",
        "_is_accepted",
        "_is_length",
        "_last_s",
        "_meter",
        "_num_tokens",
        "_started_s",
        "_trace_id",
    )

    def __init__(self, meter: RequestMeter, started_s: float, trace_id: str) -> None:
        self._meter = meter
        self._trace_id = trace_id
        self._started_s = started_s
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0
        self._is_accepted = self._is_length = False

    def accepted(self, num_prompt_tokens: int) -> None:
        """Note that the request was accepted."""
        self._is_accepted = True
        self._meter.prompt_tokens.add(num_prompt_tokens)
        self._meter.num_prompt_tokens.observe(num_prompt_tokens)

    def chunk(self, chunk: OutputChunk, now_s: float) -> None:
        """Note what reached the client, and the end if it is the final chunk."""
        num_tokens = 0
        for delta in chunk.choices:
            num_tokens += len(delta.token_ids)
            self._is_length |= delta.finish_reason == "length"
        if num_tokens:
            self._tokens(num_tokens, now_s)
        if chunk.final and chunk.error is None:
            self._finish("length" if self._is_length else "stop", now_s)
        elif chunk.final and chunk.error is not None:
            self.failed(chunk.error.code)

    def _tokens(self, num_tokens: int, now_s: float) -> None:
        meter = self._meter
        meter.generation_tokens.add(num_tokens)
        if self._num_tokens:
            meter.between_tokens.observe((now_s - self._last_s) / num_tokens, num_tokens)
        else:
            self._first_s = now_s
            meter.first_token.observe(now_s - self._started_s, trace_id=self._trace_id)
        self._num_tokens += num_tokens
        self._last_s = now_s

    def _finish(self, reason: str, now_s: float) -> None:
        meter = self._meter
        meter.whole.observe(now_s - self._started_s, trace_id=self._trace_id)
        meter.num_generated.observe(self._num_tokens)
        if self._num_tokens > 1:
            meter.per_output_token.observe((self._last_s - self._first_s) / (self._num_tokens - 1))
        self._end(reason)

    def failed(self, code: str) -> None:
        """Note an error as the request's end, by its code; a refused request does not count as one that ended."""
        if self not in self._meter.open:
            return
        self._meter.metrics.counter("request_errors_total", code).add()
        if self._is_accepted:
            self._end("abort" if code == "cancelled" else "error")
        self._meter.open.discard(self)

    def leave(self) -> None:
        """Measure no more, and count no end: the request goes on elsewhere, or has ended."""
        self._meter.open.discard(self)

    def close(self) -> None:
        """Note that nobody waits any more; without an end before, the client has left, accepted or not."""
        if self in self._meter.open:
            self._end("abort")

    def _end(self, reason: str) -> None:
        self._meter.open.discard(self)
        self._meter.metrics.counter("request_success_total", reason).add()
