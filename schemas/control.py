"""Who is alive, who owns what, and what an operator or a client wants stopped."""

from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from schemas.codec import Message, Part
from schemas.errors import ErrorBody
from schemas.generation import WorkItem

Role = Literal["gateway", "tokenizer", "scheduler", "cache_manager", "executor", "console"]
ROLES: tuple[Role, ...] = ("cache_manager", "executor", "scheduler", "tokenizer", "gateway")
"""The services that requests need; a console only looks on."""
PATH_ROLES: tuple[Role, ...] = ("tokenizer", "scheduler", "cache_manager", "executor")
"""The services that a request from a NATS client passes; over HTTP the gateway comes before them."""

State = Literal["starting", "ready", "draining", "failed"]

COMMANDS: dict[str, tuple[Role, ...]] = {
    "pause": ("scheduler",),
    "resume": ("scheduler",),
    "drain": (*ROLES, "console"),
    "flush_cache": ("cache_manager",),
    "set_log_level": (*ROLES, "console"),
}
"""What an operator may ask for, and of which roles."""


class ExecutorCapacity(Part):
    """What an executor can hold, known once its engine has loaded.

    `embedding_size`: values of an embedding; 0 when the engine gives none. `weights_version` names the weights: what
    others have computed is not shared. `num_host_blocks` keep in host memory what was evicted from `num_blocks`.
    """

    engine: str
    model_file: str
    device: str
    kernels: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    embedding_size: int = 0
    weights_version: str = ""
    num_host_blocks: int = 0


class Registration(Message):
    """One instance's entry in the registry, repeated as a heartbeat; an entry that is not repeated means *not healthy*.

    `instance` is stable over restarts (`executor-0`); `incarnation` is one life of it. `stage` and `progress` (0..1)
    tell what a starting instance is doing; `detail` adds words for a person. `load` are a few gauges, such as
    `num_requests_running`. Beats come every `heartbeat_s`; after a silence of `silent_after_s` nobody should count on
    the instance any more.
    """

    SCHEMA: ClassVar[str] = "registration"

    instance: str
    incarnation: str
    role: Role
    model: str
    state: State
    stage: str = ""
    progress: float = 0.0
    detail: str = ""
    pid: int = 0
    host: str = ""
    version: str = ""
    started_s: float = 0.0
    heartbeat_s: float = 1.0
    silent_after_s: float = 4.0
    capacity: ExecutorCapacity | None = None
    load: dict[str, float] = {}


class SchedulerLease(Message):
    """A scheduler's hold on an executor: the entry's revision in the bucket is the fencing epoch."""

    SCHEMA: ClassVar[str] = "scheduler_lease"

    executor: str
    scheduler: str
    scheduler_incarnation: str
    executor_incarnation: str


class HandedBack(Message):
    """Requests that a scheduler gave back to the queue on purpose (Unix time `at_s`): no failed attempt of theirs."""

    SCHEMA: ClassVar[str] = "handed_back"

    scheduler: str
    request_ids: tuple[str, ...]
    at_s: float


class Pause(Message):
    """An operator's word that no request of `model` begins; `in_flight` tells whether what runs finishes or holds."""

    SCHEMA: ClassVar[str] = "pause"

    model: str
    in_flight: Literal["finish", "hold"] = "finish"
    since_s: float


class CacheOwnership(Message):
    """A cache manager's hold on a model's bookkeeping: the revision at which it was taken is its epoch."""

    SCHEMA: ClassVar[str] = "cache_ownership"

    model: str
    cache_manager: str
    incarnation: str


class DeadLetter(Message):
    """A request that was given up, kept for a person: why, when (Unix time), and what was asked.

    `body` is what could not be read, when there is no `work`.
    """

    SCHEMA: ClassVar[str] = "dead_letter"

    request_id: str
    reason: str
    num_delivered: int
    died_s: float
    scheduler: str
    work: WorkItem | None = None
    body: str = ""


class Cancel(Message):
    """Stop a request; harmless for one that has ended. Sent again until the final chunk is seen."""

    SCHEMA: ClassVar[str] = "cancel"

    request_id: str
    reason: str = "cancelled by the client"


class ControlRequest(Message):
    """An operator's command to every instance of a role, or to the one that `instance` names; the others keep silent.

    `command` is one of `COMMANDS`, but travels as text: an older service names itself when it refuses a newer command.
    """

    SCHEMA: ClassVar[str] = "control_request"

    command: str
    instance: str | None = None
    arguments: dict[str, JsonValue] = {}


class ControlReply(Message):
    """One instance's answer: what the command did, or why it was refused."""

    SCHEMA: ClassVar[str] = "control_reply"

    instance: str
    role: Role
    command: str
    result: dict[str, JsonValue] = {}
    error: ErrorBody | None = None


class KeepTrace(Message):
    """Export what you hold of a trace (32 hexadecimal digits): one of its spans failed or was slow."""

    SCHEMA: ClassVar[str] = "keep_trace"

    trace_id: str = Field(pattern=r"^[0-9a-f]{32}$")


class ConfigValue(Part):
    """One configuration value and where it came from: default, file, environment, --set."""

    value: JsonValue
    source: str


class BuildFacts(Part):
    """What runs, besides the version: the commit where it is known, the schema versions, and the machine.

    `cpu_features` are the instruction sets that the operating system lists. Which kernels an executor chose of them
    stands in its `ExecutorCapacity`.
    """

    commit: str = ""
    python: str = ""
    platform: str = ""
    cpu_model: str = ""
    cpu_features: tuple[str, ...] = ()
    num_cpus: int = 0
    schemas: dict[str, int] = {}


class EffectiveConfig(Message):
    """The configuration that an instance runs with, secrets masked, and its build."""

    SCHEMA: ClassVar[str] = "effective_config"

    instance: str
    incarnation: str
    version: str
    values: dict[str, ConfigValue]
    build: BuildFacts | None = None
