"""A pause keeps what was accepted: nothing begins, what runs finishes or holds, and resuming goes on unchanged."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from schemas.errors import InvalidParameter
from services.runtime.telemetry import Tracing
from services.scheduler import pausing
from services.scheduler import service as scheduler_service
from tests.integration.services_in_memory import Answer, Deployment, ask, deployed, echo_of

Eventually = Callable[..., Awaitable[None]]
PROMPT = "go on and on; "


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_service, "CHECK_PERIOD_S", 0.03)
    monkeypatch.setattr(pausing, "READ_PERIOD_S", 0.05)


async def tell(deployment: Deployment, command: str, scheduler: str = "scheduler-0", **arguments: Any) -> Any:
    return await deployment.instances[scheduler].service.commands()[command](arguments)


def load(deployment: Deployment, gauge: str) -> float:
    return sum(i.load[gauge] for i in deployment.instances.values() if i.role == "scheduler")


async def begun(deployment: Deployment, num_tokens: int) -> tuple["asyncio.Task[Answer]", Answer]:
    """Start a request and return it when it has said something."""
    seen: list[Answer] = []
    running = asyncio.create_task(
        ask(deployment, PROMPT, max_tokens=num_tokens, temperature=0, seen=lambda answer: seen.append(answer))
    )
    while not seen:
        await asyncio.sleep(0.005)
    return running, seen[0]


async def test_what_runs_finishes_and_what_comes_waits_until_resume(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing) as deployment:
        running, _ = await begun(deployment, 60)
        assert await tell(deployment, "pause") == {"state": "paused", "model": "smol", "in_flight": "finish"}
        waiting = asyncio.create_task(ask(deployment, PROMPT, max_tokens=9, temperature=0))
        assert (await running).text == {0: echo_of(PROMPT, 60)}
        await eventually(lambda: load(deployment, "num_requests_waiting") == 1)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        registration = deployment.instances["scheduler-0"].context.heartbeat.registration
        assert registration.detail == "paused: new requests wait"
        await tell(deployment, "resume")
        assert (await waiting).text == {0: echo_of(PROMPT, 9)}
        assert registration.detail != deployment.instances["scheduler-0"].context.heartbeat.registration.detail


async def test_pause_survives_the_death_of_the_scheduler_and_holds_for_another_one(
    tracing: Tracing, eventually: Eventually
) -> None:
    async with deployed(tracing) as deployment:
        await tell(deployment, "pause")
        waiting = asyncio.create_task(ask(deployment, PROMPT, max_tokens=9, temperature=0))
        await eventually(lambda: load(deployment, "num_requests_waiting") == 1)
        await deployment.kill("scheduler-0")
        await deployment.start("scheduler", "scheduler-0")
        await eventually(lambda: load(deployment, "num_requests_waiting") == 1)
        await deployment.start("scheduler", "scheduler-1")
        assert deployment.instances["scheduler-1"].load["is_paused"]
        assert not waiting.done()
        await tell(deployment, "resume", "scheduler-1")  # whoever is told, it holds for all
        assert (await waiting).text == {0: echo_of(PROMPT, 9)}


async def test_held_requests_stop_where_they_are_and_go_on_with_the_same_tokens(
    tracing: Tracing, eventually: Eventually
) -> None:
    async with deployed(tracing, executor={"step_time_s": 0.005}) as deployment:
        running, answer = await begun(deployment, 120)
        await tell(deployment, "pause", in_flight="hold")
        await asyncio.sleep(0.3)
        said = len(answer.tokens[0])
        assert said < 120
        await asyncio.sleep(0.3)
        assert len(answer.tokens[0]) == said
        await tell(deployment, "resume")
        assert (await running).text == {0: echo_of(PROMPT, 120)}


async def test_deadline_and_cancel_count_during_a_pause(tracing: Tracing) -> None:
    async with deployed(tracing) as deployment:
        await tell(deployment, "pause")
        late = await ask(deployment, PROMPT, max_tokens=9, temperature=0, timeout_s=0.3)
        assert late.error == "deadline_exceeded"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ask(deployment, PROMPT, max_tokens=9, temperature=0)
        while load(deployment, "num_requests_waiting"):
            await asyncio.sleep(0.01)


async def test_unknown_way_to_pause_is_refused(tracing: Tracing) -> None:
    async with deployed(tracing) as deployment:
        with pytest.raises(InvalidParameter, match="finish"):
            await tell(deployment, "pause", in_flight="abort")
        assert not load(deployment, "is_paused")
