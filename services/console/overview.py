"""The deployment at one moment, as page and `natterjack top` show it: services, flows, latencies, queue, KV. Pure."""

from collections import deque
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from schemas.control import ROLES, Registration, Role
from services.console.roster import Health, Member, Roster
from services.console.samples import Samples

HISTORY_S = 600
PERCENTS = (50.0, 95.0, 99.0)
SEVERITY: tuple[Health, ...] = ("ok", "busy", "bad")
SHOWN_ROLES: tuple[Role, ...] = ("gateway", "tokenizer", "scheduler", "cache_manager", "executor", "console")


class Shown(BaseModel):
    """A frozen value that people are shown."""

    model_config = ConfigDict(frozen=True)


class InstanceView(Shown):
    """One instance."""

    name: str
    is_ready: bool
    health: Health
    state: str
    detail: str
    cpu: float
    memory_bytes: float


class RoleView(Shown):
    """All instances of a role; a role that requests need is bad when none of it is ready."""

    role: Role
    health: Health
    state: str
    instances: tuple[InstanceView, ...]


class FlowView(Shown):
    """What passes between two parts of the picture, per second; `unit` is what is counted."""

    name: str
    per_s: float
    unit: str


class ExecutorView(Shown):
    """One executor's engine and KV blocks."""

    name: str
    engine: str
    kv_usage: float
    blocks_used: int
    blocks_total: int
    sequences: int
    busy: float


class StreamView(Shown):
    """One stream: messages, and the nearer of its limits, 0 to 1."""

    name: str
    messages: int
    full: float


class Point(Shown):
    """One second of the charts; percentiles in seconds, None where nothing was measured."""

    time_s: float
    requests_per_s: float
    errors_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_s: tuple[float | None, ...]
    itl_s: tuple[float | None, ...]
    running: int
    waiting: int
    open: int


class Overview(Shown):
    """Everything but the requests."""

    time_s: float
    models: tuple[str, ...]
    version: str
    health: Health
    state: str
    roles: tuple[RoleView, ...]
    flows: tuple[FlowView, ...]
    executors: tuple[ExecutorView, ...]
    streams: tuple[StreamView, ...]
    cached_share: float | None
    preemptions_per_s: float
    point: Point


FLOWS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    # name: (metric, role that counts it, unit, labels)
    "client-gateway": ("requests", "gateway", "req/s", {}),
    "gateway-tokenizer": ("bus_hop_seconds_count", "tokenizer", "req/s", {"subject": "generate_request"}),
    "tokenizer-work": ("requests_accepted_total", "tokenizer", "req/s", {}),
    "scheduler-executor": ("bus_hop_seconds_count", "executor", "plans/s", {"subject": "step_plan"}),
    "executor-scheduler": ("bus_hop_seconds_count", "scheduler", "results/s", {"subject": "step_result"}),
    "scheduler-cache_manager": ("bus_hop_seconds_count", "cache_manager", "commands/s", {"subject": "cache_command"}),
    "scheduler-tokenizer": ("bus_hop_seconds_count", "tokenizer", "batches/s", {"subject": "token_batch"}),
    "tokenizer-out": ("output_appended_tokens_total", "tokenizer", "tok/s", {}),
    "gateway-client": ("generation_tokens_total", "gateway", "tok/s", {}),
}
"""What each arrow of the picture shows."""


def overview(roster: Roster, samples: Samples, now_s: float, time_s: float) -> Overview:
    """Return the deployment as it is; `now_s` is of the clock of roster and samples, `time_s` is Unix time."""
    members = roster.members(now_s)
    roles = tuple(_role(role, members, samples, now_s) for role in SHOWN_ROLES)
    health, state = _whole(roles)
    queries = samples.rate("prefix_cache_queries_total", now_s)
    return Overview(
        time_s=time_s,
        models=tuple(sorted({member.registration.model for member in members if member.health != "bad"})),
        version=", ".join(sorted({member.registration.version for member in members})),
        health=health,
        state=state,
        roles=roles,
        flows=tuple(_flows(samples, now_s)),
        executors=tuple(_executors(members, samples, now_s)),
        streams=tuple(_streams(samples, now_s)),
        cached_share=samples.rate("prefix_cache_hits_total", now_s) / queries if queries else None,
        preemptions_per_s=samples.rate("num_preemptions_total", now_s),
        point=_point(samples, now_s, time_s),
    )


def _role(role: Role, members: list[Member], samples: Samples, now_s: float) -> RoleView:
    own = [member for member in members if member.registration.role == role]
    ready = sum(member.is_ready for member in own)
    if not own:
        health: Health = "bad" if role in ROLES else "busy"
        state = "no instance"
    else:
        health = max((member.health for member in own), key=SEVERITY.index)
        if health == "bad" and any(member.health == "ok" for member in own):
            health = "busy"  # others carry on
        state = f"{ready} ready" if ready == len(own) else f"{ready} of {len(own)} ready"
    views = tuple(_instance(member, samples, now_s) for member in own)
    return RoleView(role=role, health=health, state=state, instances=views)


def _instance(member: Member, samples: Samples, now_s: float) -> InstanceView:
    name = member.registration.instance
    return InstanceView(
        name=name,
        is_ready=member.is_ready,
        health=member.health,
        state=member.state,
        detail=member.registration.detail,
        cpu=samples.rate("process_cpu_seconds_total", now_s, instance=name),
        memory_bytes=samples.gauge("process_resident_memory_bytes", now_s, instance=name),
    )


def _whole(roles: tuple[RoleView, ...]) -> tuple[Health, str]:
    """A request needs every role but the console's."""
    missing = [view.role for view in roles if view.role in ROLES and not any(i.is_ready for i in view.instances)]
    if missing:
        return "bad", f"not ready: no {', '.join(missing)}"
    if troubled := [i.name for view in roles for i in view.instances if i.health != "ok"]:
        return "busy", f"ready, but look at {', '.join(troubled[:3])}{' …' if len(troubled) > 3 else ''}"
    return "ok", "ready"


def _flows(samples: Samples, now_s: float) -> Iterator[FlowView]:
    for name, (metric, role, unit, labels) in FLOWS.items():
        if metric == "requests":
            per_s = _ended(samples, now_s, role)
        else:
            per_s = samples.rate(metric, now_s, role=role, **labels)
        yield FlowView(name=name, per_s=per_s, unit=unit)


def _ended(samples: Samples, now_s: float, role: str = "") -> float:
    return samples.rate("request_success_total", now_s, role=role)


def _executors(members: list[Member], samples: Samples, now_s: float) -> Iterator[ExecutorView]:
    usage = {
        labels.get("executor", ""): value
        for labels, value in samples.gauges("kv_cache_usage_perc", now_s, role="cache_manager")
    }
    for member in members:
        registration = member.registration
        if registration.role == "executor" and registration.capacity is not None:
            yield _executor(registration, usage.get(registration.instance, 0.0), samples, now_s)


def _executor(registration: Registration, usage: float, samples: Samples, now_s: float) -> ExecutorView:
    capacity, name = registration.capacity, registration.instance
    total = capacity.num_blocks if capacity is not None else 0
    return ExecutorView(
        name=name,
        engine=f"{capacity.engine} on {capacity.device}" if capacity is not None else "",
        kv_usage=usage,
        blocks_used=round(usage * total),
        blocks_total=total,
        sequences=round(samples.gauge("num_sequences_held", now_s, instance=name)),
        busy=min(1.0, samples.rate("executor_busy_seconds_total", now_s, instance=name)),
    )


def _streams(samples: Samples, now_s: float) -> Iterator[StreamView]:
    """Every gateway sees the same streams."""
    full = {labels.get("stream", ""): value for labels, value in samples.gauges("stream_full_perc", now_s)}
    messages = {labels.get("stream", ""): value for labels, value in samples.gauges("stream_messages", now_s)}
    for name, value in sorted(messages.items()):
        yield StreamView(name=name, messages=round(value), full=full.get(name, 0.0))


def _point(samples: Samples, now_s: float, time_s: float) -> Point:
    return Point(
        time_s=time_s,
        requests_per_s=_ended(samples, now_s),
        errors_per_s=samples.rate("request_errors_total", now_s),
        output_tokens_per_s=samples.rate("generation_tokens_total", now_s),
        prompt_tokens_per_s=samples.rate("prompt_tokens_total", now_s),
        ttft_s=tuple(samples.percentiles("time_to_first_token_seconds", PERCENTS, now_s)),
        itl_s=tuple(samples.percentiles("inter_token_latency_seconds", PERCENTS, now_s)),
        running=round(samples.gauge("num_requests_running", now_s)),
        waiting=round(samples.gauge("num_requests_waiting", now_s)),
        open=round(samples.gauge("num_requests_open", now_s)),
    )


class History:
    """The charts' last ten minutes, one point a second."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=HISTORY_S)

    def add(self, point: Point) -> None:
        """Append a second."""
        self._points.append(point)

    @property
    def points(self) -> tuple[Point, ...]:
        """Oldest first."""
        return tuple(self._points)
