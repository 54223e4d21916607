"""The streams, buckets and consumers of a deployment, with their limits; every service may ensure them at its start."""

from schemas.generation import PRIORITIES
from schemas.subjects import Subjects
from services.runtime.bus import KV_STREAM_PREFIX, KV_SUBJECT_PREFIX
from services.runtime.settings import BusSettings
from services.runtime.transport import ConsumerSpec, StreamSpec, Transport

KIB = 1024
MAX_WORK_BYTES = 1 << 30
MAX_REGISTRY_BYTES = 16 * KIB * KIB
MAX_CONFIG_BYTES = 64 * KIB * KIB
MAX_DEAD_BYTES = 64 * KIB * KIB
MAX_RESPONSE_BYTES = 256 * KIB * KIB
DEAD_LETTER_AGE_S = 7 * 86_400.0
CONFIG_HISTORY = 16


def stream_specs(subjects: Subjects, settings: BusSettings) -> tuple[StreamSpec, ...]:
    """Return the work queue, the output log, the responses' records, the dead letters and the three buckets."""
    return (
        StreamSpec(
            subjects.work_stream,
            [subjects.work_all],
            max_age_s=settings.work_max_age_s,
            max_bytes=MAX_WORK_BYTES,
            max_msgs=settings.work_max_msgs,
            work_queue=True,
        ),
        StreamSpec(
            subjects.out_stream,
            [subjects.out_all],
            max_age_s=settings.out_max_age_s,
            max_bytes=settings.out_max_bytes,
            republish=(subjects.out_all, subjects.live_all),
        ),
        StreamSpec(
            subjects.response_stream,
            [subjects.response_all],
            max_age_s=settings.out_max_age_s,
            max_bytes=MAX_RESPONSE_BYTES,
            max_msgs_per_subject=1,
        ),
        StreamSpec(subjects.dead_stream, [subjects.dead_all], max_age_s=DEAD_LETTER_AGE_S, max_bytes=MAX_DEAD_BYTES),
        _bucket(subjects.registry, max_bytes=MAX_REGISTRY_BYTES, in_memory=True, message_ttl=True),
        _bucket(subjects.leases, max_bytes=MAX_REGISTRY_BYTES, message_ttl=True),
        _bucket(subjects.config, max_bytes=MAX_CONFIG_BYTES, history=CONFIG_HISTORY),
    )


def _bucket(
    name: str, *, max_bytes: int, history: int = 1, in_memory: bool = False, message_ttl: bool = False
) -> StreamSpec:
    return StreamSpec(
        KV_STREAM_PREFIX + name,
        [f"{KV_SUBJECT_PREFIX}{name}.>"],
        max_bytes=max_bytes,
        max_msgs_per_subject=history,
        in_memory=in_memory,
        message_ttl=message_ttl,
    )


async def ensure_streams(transport: Transport, subjects: Subjects, settings: BusSettings) -> None:
    """Create what is missing; harmless when several services do it at once."""
    for spec in stream_specs(subjects, settings):
        await transport.ensure_stream(spec)


def work_consumer(subjects: Subjects, model: str, priority: str, ack_wait_s: float) -> ConsumerSpec:
    """Return the one consumer of a model's work of one priority."""
    return ConsumerSpec(
        subjects.work_stream,
        subjects.work_consumer(model, priority),
        subjects.work(model, priority),
        ack_wait_s=ack_wait_s,
    )


async def ensure_work_consumers(transport: Transport, subjects: Subjects, model: str, ack_wait_s: float) -> None:
    """Create one consumer per priority, so that what is urgent can be taken past what is not."""
    await transport.drop_consumer(subjects.work_stream, subjects.former_work_consumer(model))
    for priority in PRIORITIES:
        await transport.ensure_consumer(work_consumer(subjects, model, priority, ack_wait_s))
