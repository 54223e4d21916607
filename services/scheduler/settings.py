"""The scheduler's settings."""

from pydantic import Field

from schemas.step import MAX_PLANS_AHEAD
from services.runtime.settings import CommonSettings, Seconds, Section


class SchedulerSettings(Section):
    """How much runs at once, how far ahead it is planned, and when something is given up."""

    max_num_seqs: int = Field(
        default=32, ge=1, le=4096, description="sequences that run at the same time on an executor"
    )
    max_num_batched_tokens: int = Field(default=512, ge=1, description="tokens of one step, prompt chunks included")
    target_itl_ms: float = Field(
        default=100.0,
        ge=0,
        description="milliseconds that a step with decodes should take; prompt chunks beside them adapt to what steps "
        "are measured to take. 0: no target",
    )
    ageing_s: float = Field(
        default=60.0,
        ge=0,
        description="seconds of waiting that are worth one priority class, so that none starves; 0: strict priority",
    )
    max_waiting: int = Field(
        default=256,
        ge=1,
        description="requests of a priority class and those above it that are taken from the work queue to wait for "
        "room; an eighth of it is each class's own",
    )
    plan_depth: int = Field(
        default=2,
        ge=1,
        le=MAX_PLANS_AHEAD,
        description="steps that are sent to an executor before their results are back",
    )
    lookahead_tokens: int = Field(
        default=32, ge=1, description="tokens that a block lease covers beyond what is needed now"
    )
    lease_s: Seconds = Field(default=3.0, description="life of the hold on an executor when it is not renewed")
    step_timeout_s: Seconds = Field(default=60.0, description="how long the result of a step may take")
    request_ack_wait_s: Seconds = Field(
        default=3.0, description="silence after which the queue gives a request to another scheduler"
    )
    output_timeout_s: Seconds = Field(
        default=3.0, description="how long the end of a request's output may stay untold before it is asked for again"
    )
    max_deliver: int = Field(default=5, ge=1, description="times that a request is given out before it fails")


class Settings(CommonSettings):
    """Everything that the scheduler reads."""

    scheduler: SchedulerSettings = SchedulerSettings()
