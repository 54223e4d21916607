"""A cancelled request ends soon and costs little, whatever it was doing: how long, and how many tokens, is asserted.

In memory, so that the bounds are the path's own: one step takes 10 ms here, and plans are two steps ahead.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from schemas.control import Cancel
from schemas.generation import GenerateRequest
from schemas.output import OutputChunk
from services.runtime import generation
from services.runtime.generation import generate
from services.runtime.telemetry import Tracing
from services.scheduler import service as scheduler_service
from tests.integration.services_in_memory import QUICK_SCHEDULER, Deployment, deployed

STEP_S = 0.01
PLAN_DEPTH = 2
CHUNK_TOKENS = 32
LONG = 4000
MAX_ABORT_S = 1.0
"""What the design promises; on a quiet machine it is a few steps."""


@dataclass
class Abort:
    """How long a cancelled request took to end, and what was computed for nothing."""

    seconds: float
    num_wasted: float
    num_said: int


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_service, "CHECK_PERIOD_S", 0.03)
    monkeypatch.setattr(generation, "CANCEL_PERIOD_S", 0.05)


def wasted(deployment: Deployment) -> float:
    return sum(i.load["num_tokens_wasted"] for i in deployment.instances.values() if i.role == "scheduler")


def running(deployment: Deployment) -> list[Any]:
    """Return every sequence that runs on an executor."""
    sessions = [s for i in deployment.instances.values() if i.role == "scheduler" for s in i.service._sessions.values()]
    return [sequence for session in sessions if session.state for sequence in session.state.running.values()]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def cancelled(deployment: Deployment, request: GenerateRequest, moment: Callable[[], Awaitable[object]]) -> Abort:
    """Ask, cancel when the moment has come, and wait for the end in the log."""
    bus, said, before = deployment.bus(), 0, wasted(deployment)
    async with asyncio.timeout(20), generate(bus, request) as stream:
        ended = asyncio.create_task(_read(stream))
        await moment()
        began_s = time.perf_counter()
        await bus.publish(bus.subjects.cancel(stream.request_id), Cancel(request_id=stream.request_id))
        said, final = await ended
        took_s = time.perf_counter() - began_s
        assert final.error is not None
        assert final.error.code == "cancelled"
    await until(lambda: not running(deployment))
    return Abort(took_s, wasted(deployment) - before, said)


async def _read(stream: Any) -> tuple[int, OutputChunk]:
    said = 0
    async for chunk in stream:
        said += sum(len(delta.token_ids) for delta in chunk.choices)
    return said, chunk


def request(**changes: Any) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {"model": "smol", "prompt": "on and on; ", "max_tokens": LONG, "temperature": 1, "seed": 3, **changes}
    )


def quick_steps(**scheduler: Any) -> dict[str, dict[str, Any]]:
    return {"executor": {"step_time_s": STEP_S, "num_blocks": 2048}, "scheduler": scheduler}


def check(what: str, abort: Abort, max_wasted: float) -> None:
    print(f"{what:<28} aborted in {1e3 * abort.seconds:6.1f} ms, {abort.num_wasted:3.0f} tokens wasted")
    assert abort.seconds < MAX_ABORT_S, what
    assert abort.num_wasted <= max_wasted, what


@pytest.mark.parametrize("n", [1, 4])
async def test_cancel_during_decode_wastes_what_was_planned_ahead_and_no_more(tracing: Tracing, n: int) -> None:
    async with deployed(tracing, **quick_steps()) as deployment:

        async def moment() -> None:
            await until(lambda: len(running(deployment)) == n and all(s.num_generated > 5 for s in running(deployment)))

        abort = await cancelled(deployment, request(n=n), moment)
        check(f"decode, n={n}", abort, PLAN_DEPTH * n)
        assert abort.num_said >= 5 * n


@pytest.mark.parametrize("n", [1, 4])
async def test_cancel_during_prefill_wastes_at_most_the_chunks_on_their_way(tracing: Tracing, n: int) -> None:
    async with deployed(tracing, **quick_steps(max_num_batched_tokens=CHUNK_TOKENS)) as deployment:

        async def moment() -> None:
            await until(lambda: any(sequence.num_computed >= CHUNK_TOKENS for sequence in running(deployment)))

        abort = await cancelled(deployment, request(prompt="much to read " * 120, n=n, max_tokens=9), moment)
        check(f"prefill, n={n}", abort, PLAN_DEPTH * CHUNK_TOKENS)
        assert abort.num_said == 0


async def test_cancel_before_the_first_token_or_while_queued_computes_nothing_more(tracing: Tracing) -> None:
    async with deployed(tracing, **quick_steps(max_num_seqs=1)) as deployment:
        at_once = await cancelled(deployment, request(), lambda: asyncio.sleep(0))
        check("before the first token", at_once, PLAN_DEPTH * CHUNK_TOKENS)
        first = asyncio.create_task(_whole(deployment))
        await until(lambda: running(deployment))
        scheduler = deployment.instances["scheduler-0"]
        bus, waiting = deployment.bus(), request(n=2)
        before = wasted(deployment)
        async with asyncio.timeout(20), generate(bus, waiting) as stream:
            await until(lambda: scheduler.load["num_requests_waiting"] == 1)
            began_s = time.perf_counter()
            await bus.publish(bus.subjects.cancel(stream.request_id), Cancel(request_id=stream.request_id))
            said, final = await _read(stream)
            queued = Abort(time.perf_counter() - began_s, wasted(deployment) - before, said)
        assert final.error is not None
        check("queued, n=2", queued, 0)
        assert (await first) == 200
        assert said == 0


async def _whole(deployment: Deployment) -> int:
    async with generate(deployment.bus(), request(max_tokens=200)) as stream:
        return (await _read(stream))[0]


async def test_cancel_during_a_takeover_counts_as_soon_as_somebody_holds_the_request(tracing: Tracing) -> None:
    """The client's word comes while no scheduler lives; it is repeated, and remembered by the next one."""
    async with deployed(tracing, **quick_steps()) as deployment:
        bus = deployment.bus()
        async with asyncio.timeout(20), generate(bus, request()) as stream:
            ended = asyncio.create_task(_read(stream))
            await until(lambda: running(deployment))
            await deployment.kill("scheduler-0")
            repeating = asyncio.create_task(stream.cancel())
            await asyncio.sleep(0.1)
            await deployment.start("scheduler", "scheduler-0")
            began_s = time.perf_counter()
            _, final = await ended
            took_s = time.perf_counter() - began_s
            await repeating
        assert final.error is not None
        assert final.error.code == "cancelled"
        await until(lambda: not running(deployment))
        print(f"{'takeover':<28} aborted {1e3 * took_s:6.1f} ms after the next scheduler began")
        assert took_s < QUICK_SCHEDULER["request_ack_wait_s"] + MAX_ABORT_S
        assert wasted(deployment) == 0


async def test_client_that_leaves_a_stream_has_cancelled_it(tracing: Tracing) -> None:
    async with deployed(tracing, **quick_steps()) as deployment:
        async with generate(deployment.bus(), request(n=2)) as stream:
            await anext(aiter(stream))
        began_s = time.perf_counter()
        await until(lambda: not running(deployment))
        check("left, n=2", Abort(time.perf_counter() - began_s, wasted(deployment), 0), PLAN_DEPTH * 2)


async def test_cancel_just_after_the_end_is_harmless(tracing: Tracing) -> None:
    async with deployed(tracing, **quick_steps()) as deployment:
        bus = deployment.bus()
        async with generate(bus, request(max_tokens=3)) as stream:
            said, final = await _read(stream)
        for _ in range(3):
            await bus.publish(bus.subjects.cancel(stream.request_id), Cancel(request_id=stream.request_id))
        await asyncio.sleep(0.1)
        subjects = bus.subjects
        stored = await bus.read(subjects.out_stream, subjects.out(stream.request_id), OutputChunk)
        assert [entry.message.final for entry in stored].count(True) == 1
        assert (said, final.error) == (3, None)
        assert await _whole(deployment) == 200
