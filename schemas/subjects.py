"""Every subject, stream and bucket name: the only place where they are written.

All names begin with the deployment's prefix (`bus.prefix`, default `nj`), so that two deployments share one nats-server
without seeing each other.
"""

import re
from dataclasses import dataclass

_PLAIN = re.compile(rb"[A-Za-z0-9_-]")
_PREFIX = re.compile(r"[a-z][a-z0-9_-]{0,31}")


def subject_token(raw: str) -> str:
    """Encode a model name or an id as one subject token; injective, so two names never share a subject.

    Letters, digits, `_` and `-` stay; every other byte of the UTF-8 form becomes `=XX`: `a/b.c` → `a=2Fb=2Ec`. Nothing
    becomes `=`, for a subject has no empty tokens.
    """
    encoded = raw.encode("utf-8", "surrogatepass")
    return "".join(chr(byte) if _PLAIN.fullmatch(bytes([byte])) else f"={byte:02X}" for byte in encoded) or "="


def raw_of(token: str) -> str:
    """Return what `subject_token` has encoded."""
    raw = re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), token.encode("utf-8", "surrogatepass"))
    return "" if token == "=" else raw.decode("utf-8", "replace")


def is_prefix(text: str) -> bool:
    """Tell whether `text` may be a deployment's prefix."""
    return _PREFIX.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Subjects:
    """The names of one deployment."""

    prefix: str = "nj"

    def _v1(self, *tokens: str) -> str:
        return ".".join((self.prefix, "v1", *tokens))

    def all_of(self, *kind: str) -> str:
        """Return the wildcard over every subject of a kind such as `exec`, or over all: what a recorder listens on."""
        return self._v1(*kind, ">")

    # ---- core subjects

    def generate(self, model: str) -> str:
        """GenerateRequest: client or gateway → tokenizer (queue group)."""
        return self._v1("generate", subject_token(model))

    def tokenize(self, model: str) -> str:
        """TokenizeRequest: client or gateway → tokenizer (queue group)."""
        return self._v1("tokenize", subject_token(model))

    def detokenize(self, model: str) -> str:
        """DetokenizeRequest: client or gateway → tokenizer (queue group)."""
        return self._v1("detokenize", subject_token(model))

    def cache(self, model: str) -> str:
        """CacheCommand: scheduler → cache_manager."""
        return self._v1("cache", subject_token(model))

    def plan(self, executor: str) -> str:
        """StepPlan: scheduler → executor."""
        return self._v1("exec", subject_token(executor), "plan")

    def result(self, executor: str) -> str:
        """StepResult: executor → scheduler."""
        return self._v1("exec", subject_token(executor), "result")

    def detok(self, tokenizer: str) -> str:
        """TokenBatch: scheduler → the tokenizer that holds the request."""
        return self._v1("detok", subject_token(tokenizer))

    def feedback(self, scheduler: str) -> str:
        """OutputFeedback: tokenizer → scheduler."""
        return self._v1("feedback", subject_token(scheduler))

    def cancel(self, request: str) -> str:
        """Cancel: anyone → scheduler."""
        return self._v1("cancel", subject_token(request))

    def control(self, role: str) -> str:
        """ControlRequest: operator → every instance of a role."""
        return self._v1("control", subject_token(role))

    @property
    def keep_trace(self) -> str:
        """KeepTrace: every instance → every instance."""
        return self._v1("keep_trace")

    @property
    def cancel_all(self) -> str:
        """The wildcard that the scheduler listens on."""
        return self._v1("cancel", "*")

    # ---- for those who look on

    def spans(self, role: str) -> str:
        """SpanBatch: every instance → console."""
        return self._v1("spans", subject_token(role))

    @property
    def spans_all(self) -> str:
        """Every role's spans."""
        return self._v1("spans", "*")

    def samples(self, role: str) -> str:
        """MetricSample: every instance → console, operator."""
        return self._v1("samples", subject_token(role))

    @property
    def samples_all(self) -> str:
        """Every role's samples."""
        return self._v1("samples", "*")

    def trace(self) -> str:
        """TraceQuery: operator → any console (queue group)."""
        return self._v1("trace")

    # ---- JetStream: the work queue and the output log

    def work(self, model: str, priority: str) -> str:
        """WorkItem: tokenizer → scheduler, durable."""
        return self._v1("work", subject_token(model), subject_token(priority))

    def work_of(self, model: str) -> str:
        """The wildcard over one model's priorities."""
        return self._v1("work", subject_token(model), "*")

    @property
    def work_all(self) -> str:
        """What the work stream stores."""
        return self._v1("work", ">")

    def out(self, request: str) -> str:
        """OutputChunk: tokenizer → output log, compare-and-set append."""
        return self._v1("out", subject_token(request))

    @property
    def out_all(self) -> str:
        """What the output stream stores."""
        return self._v1("out", ">")

    def live(self, request: str) -> str:
        """OutputChunk: the output log, republished by the server → gateway, any client."""
        return self._v1("live", subject_token(request))

    @property
    def live_all(self) -> str:
        """Where the output stream republishes to."""
        return self._v1("live", ">")

    def response(self, request: str) -> str:
        """StoredResponse: gateway → any gateway, one message per response."""
        return self._v1("response", subject_token(request))

    @property
    def response_all(self) -> str:
        """What the stream of responses stores."""
        return self._v1("response", ">")

    @property
    def response_stream(self) -> str:
        """The records of responses."""
        return f"{self.prefix.upper()}_RESPONSES"

    # ---- what was given up

    def dead(self, request: str) -> str:
        """DeadLetter: scheduler → operator."""
        return self._v1("dead", subject_token(request))

    @property
    def dead_all(self) -> str:
        """What the dead-letter stream stores."""
        return self._v1("dead", ">")

    @property
    def dead_stream(self) -> str:
        """The dead letters."""
        return f"{self.prefix.upper()}_DLQ"

    @property
    def work_stream(self) -> str:
        """The work-queue stream."""
        return f"{self.prefix.upper()}_WORK"

    @property
    def out_stream(self) -> str:
        """The output-log stream."""
        return f"{self.prefix.upper()}_OUT"

    def work_consumer(self, model: str, priority: str) -> str:
        """The one durable name on a model's work of one priority: the server would refuse a second, overlapping one."""
        return f"scheduler-{subject_token(model)}-{priority}"

    def former_work_consumer(self, model: str) -> str:
        """The durable name that all priorities shared before 0.2; it stands in the way of those of today."""
        return f"scheduler-{subject_token(model)}"

    # ---- key-value buckets

    @property
    def registry(self) -> str:
        """Registration by instance; every key expires unless its owner beats."""
        return f"{self.prefix}_registry"

    @property
    def leases(self) -> str:
        """Lease by executor; the revision is the fencing epoch."""
        return f"{self.prefix}_lease"

    @property
    def config(self) -> str:
        """Effective configuration by instance."""
        return f"{self.prefix}_config"
