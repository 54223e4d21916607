"""What the tokenizer counts and measures: admissions, encoding, appends, and the requests of NATS clients."""

import contextlib
import time
from collections.abc import Callable, Iterator

from schemas.errors import NatterjackError
from schemas.generation import OutputSpec
from schemas.output import OutputChunk
from services.runtime.metrics import Metrics
from services.runtime.request_meter import RequestMeter, RequestTimes


class AdmissionMeters:
    """The front door."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._accepted = metrics.counter("requests_accepted_total")
        self._encode = metrics.histogram("request_encode_seconds")

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        """Count a refusal by its code."""
        try:
            yield
        except NatterjackError as error:
            self._metrics.counter("admission_rejections_total", error.code).add()
            raise

    @contextlib.contextmanager
    def encoding(self) -> Iterator[None]:
        """Measure the encoding of one prompt."""
        started_s = time.perf_counter()
        yield
        self._encode.observe(time.perf_counter() - started_s)

    def accepted(self) -> None:
        """Count a request that is in the work queue now."""
        self._accepted.add()


class OutputMeters:
    """The way back."""

    def __init__(self, metrics: Metrics, num_open: Callable[[], int]) -> None:
        self._requests = RequestMeter(metrics)
        self._append = metrics.histogram("output_append_seconds")
        self._detokenize = metrics.histogram("detokenize_seconds")
        self._tokens = metrics.counter("output_appended_tokens_total")
        self._failures = metrics.counter("output_append_failures_total", "fenced")
        metrics.gauge("num_outputs_open", num_open)

    def opened(self, spec: OutputSpec, is_resumed: bool) -> RequestTimes | None:
        """Begin to measure a request whose client gets replies from here; the gateway measures the others."""
        if spec.reply is None or is_resumed:
            return None
        times = self._requests.begin(spec.created_s)
        times.accepted(spec.num_prompt_tokens)
        return times

    def decoded(self, started_s: float) -> None:
        """Note that a batch of tokens has become text."""
        self._detokenize.observe(time.perf_counter() - started_s)

    def appended(self, chunk: OutputChunk, started_s: float, times: RequestTimes | None) -> None:
        """Note a stored chunk, whose append began at `started_s` of the performance counter."""
        self._append.observe(time.perf_counter() - started_s)
        self._tokens.add(sum(len(delta.token_ids) for delta in chunk.choices))
        if times is not None:
            times.chunk(chunk, time.time())

    def ended(self, event: str, times: RequestTimes | None) -> None:
        """Note that nothing more is written here; a fenced output goes on elsewhere."""
        self._failures.add(event == "fenced")
        if times is not None:
            times.leave()
