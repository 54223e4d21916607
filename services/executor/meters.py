"""What the executor counts and measures: steps by phase, idle time, work that nobody wanted any more."""

from collections.abc import Callable

from engine_core.engine import EngineInfo
from schemas.step import StepResult
from services.runtime.metrics import Metrics


class ExecutorMeters:
    """The metrics of one executor."""

    def __init__(self, metrics: Metrics, num_sequences: Callable[[], int]) -> None:
        self._metrics = metrics
        self._steps = {phase: metrics.histogram("step_seconds", phase) for phase in ("prefill", "decode", "mixed")}
        self._idle = metrics.counter("executor_idle_seconds_total")
        self._busy = metrics.counter("executor_busy_seconds_total")
        self._wasted = metrics.counter("tokens_wasted_after_cancel_total")
        self._refused = metrics.counter("steps_refused_total")
        metrics.gauge("num_sequences_held", num_sequences)

    def loaded(self, instance: str, info: EngineInfo) -> None:
        """Show the shape of the KV pool."""
        labels = (instance, str(info.block_size), str(info.num_blocks))
        self._metrics.gauge("cache_config_info", lambda: 1, *labels)

    def stepped(self, result: StepResult, phase: str) -> None:
        """Note a step that is done; `phase` is prefill, decode or mixed."""
        if result.fault is not None:
            self._refused.add()
            return
        self._wasted.add(result.num_wasted)
        self._idle.add(result.idle_s)
        self._busy.add(result.duration_s)
        if result.sampled or result.duration_s > 0:
            self._steps[phase].observe(result.duration_s)
