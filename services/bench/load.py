"""Sends prompts at their times, at most so many at once, and collects what came of each. Knows no transport."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time

from services.bench.client import Client, RequestFailed
from services.bench.prompts import Prompt
from services.bench.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Load:
    """What to send: `prompts[i]` at `times_s[i]` after the start; `max_concurrency` 0 sets no limit."""

    prompts: Sequence[Prompt]
    times_s: Sequence[float]
    max_concurrency: int = 0
    timeout_s: float = 600.0


@dataclass(slots=True)
class Progress:
    """How far a load is, for whoever shows it; counts are computed from what has ended."""

    num_requests: int = 0
    num_started: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    began_s: float = field(default_factory=perf_counter)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A load's records in the prompts' order, the wall time, and the processor time of this process, in seconds."""

    records: list[RequestRecord]
    duration_s: float
    client_cpu_s: float


async def run_load(client: Client, load: Load, progress: Progress | None = None) -> Outcome:
    """Send everything and wait for every answer; a request that fails is noted, never raised."""
    progress = progress or Progress()
    progress.num_requests, progress.began_s = len(load.prompts), perf_counter()
    slots = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    began_s, cpu_s = perf_counter(), process_time()
    records = [RequestRecord(due_s=began_s + time_s) for time_s in load.times_s]
    async with asyncio.TaskGroup() as tasks:
        for prompt, record in zip(load.prompts, records, strict=True):
            if (wait_s := record.due_s - perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(_run_one(client, prompt, record, slots, load.timeout_s, progress))
    return Outcome(records, perf_counter() - began_s, process_time() - cpu_s)


async def _run_one(
    client: Client,
    prompt: Prompt,
    record: RequestRecord,
    slots: asyncio.Semaphore | None,
    timeout_s: float,
    progress: Progress,
) -> None:
    async with _slot(slots):
        progress.num_started += 1
        record.started_s = perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                await client.run(prompt, record)
        except RequestFailed as failure:
            record.error = str(failure)
        except TimeoutError:
            record.error = f"no end after {timeout_s:g} s"
        record.ended_s = record.ended_s or perf_counter()
    progress.num_ended += 1
    progress.num_failed += bool(record.error)
    progress.num_output_tokens += 0 if record.error else record.num_output_tokens


@contextlib.asynccontextmanager
async def _slot(slots: asyncio.Semaphore | None) -> AsyncIterator[None]:
    if slots is None:
        yield
        return
    async with slots:
        yield
