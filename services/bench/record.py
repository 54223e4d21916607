"""What a client notes about one request. Times are of `time.perf_counter`, in seconds."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival on; it succeeded when `error` is empty and it has ended.

    `due_s`: when it was to be sent; the difference to `started_s` is what a limit on concurrency made it wait here.
    `pieces_s`: when each piece of the answer came; a piece may hold several tokens. `text` only if it was wanted.
    """

    due_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
    text: str = ""

    @property
    def is_success(self) -> bool:
        """Whether the answer is complete."""
        return not self.error and self.ended_s > 0

    @property
    def ttft_s(self) -> float:
        """From sending to the first piece; 0 without one."""
        return self.pieces_s[0] - self.started_s if self.pieces_s else 0.0

    @property
    def latency_s(self) -> float:
        """From sending to the last piece, or to the end of an answer without text."""
        return (self.pieces_s[-1] if self.pieces_s else self.ended_s) - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None when there is none."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Times between pieces."""
        return [after - before for before, after in zip(self.pieces_s, self.pieces_s[1:], strict=False)]

    @property
    def queue_s(self) -> float:
        """How long it waited in the client for its turn."""
        return self.started_s - self.due_s
