"""Several cache managers of one model: one keeps the books, another takes over, and a zombie's word counts no more."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from schemas.cache import CacheCommand, CacheReply, OpenPool
from schemas.errors import Unavailable
from services.runtime.telemetry import Tracing
from services.scheduler import service as scheduler_service
from services.scheduler import session
from tests.integration.services_in_memory import Deployment, ask, deployed, echo_of

Eventually = Callable[..., Awaitable[None]]
PROMPT = "blocks are kept by one; "
MANY = 400


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_service, "CHECK_PERIOD_S", 0.03)
    monkeypatch.setattr(session, "CACHE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(session, "CACHE_RETRY_S", 0.03)


def epochs(deployment: Deployment) -> dict[str, float]:
    return {n: i.load["lease_epoch"] for n, i in deployment.instances.items() if i.role == "cache_manager"}


async def test_second_one_stands_by_until_the_first_dies(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing, cache_manager={"lease_s": 1.0}) as deployment:
        await deployment.start("cache_manager", "cache_manager-1")
        first = epochs(deployment)
        assert first["cache_manager-0"] > 0
        assert first["cache_manager-1"] == 0
        standby = deployment.instances["cache_manager-1"].context.heartbeat
        await eventually(lambda: standby.registration.detail == "standing by")
        running = asyncio.create_task(ask(deployment, PROMPT, max_tokens=MANY, temperature=0))
        await asyncio.sleep(0.1)
        await deployment.kill("cache_manager-0")
        assert (await running).text == {0: echo_of(PROMPT, MANY)}
        await eventually(lambda: epochs(deployment)["cache_manager-1"] > first["cache_manager-0"])
        await eventually(lambda: standby.registration.detail == "")


async def test_one_that_leaves_hands_the_books_over_at_once(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing, cache_manager={"lease_s": 30.0}) as deployment:
        await deployment.start("cache_manager", "cache_manager-1")
        await deployment.retire("cache_manager-0")
        await deployment.instances["cache_manager-1"].service._check_ownership()  # it would, 7 s later
        assert epochs(deployment)["cache_manager-1"] > 0
        assert (await ask(deployment, PROMPT, max_tokens=9, temperature=0)).text == {0: echo_of(PROMPT, 9)}


async def test_zombie_answers_nothing_and_forgets_its_books(tracing: Tracing, eventually: Eventually) -> None:
    """It sleeps past its lease, and wakes up with a subscription and blocks that it does not own any more."""
    async with deployed(tracing, cache_manager={"lease_s": 0.6}) as deployment:
        assert (await ask(deployment, PROMPT, max_tokens=9, temperature=0)).text == {0: echo_of(PROMPT, 9)}
        zombie = deployment.instances["cache_manager-0"]
        zombie.waiting.cancel()  # neither renews nor looks at the clock
        await deployment.start("cache_manager", "cache_manager-1")
        await eventually(lambda: epochs(deployment)["cache_manager-1"] > 0)
        assert zombie.load["num_pools"] == 1
        command = CacheCommand(
            scheduler="s", executor="e", epoch=1, operations=(OpenPool(incarnation="i", num_blocks=4, block_size=4),)
        )
        incoming = type("Asked", (), {"message": command})()
        with pytest.raises(Unavailable, match="cannot be certain"):
            await zombie.service._command(incoming)
        running = asyncio.create_task(ask(deployment, PROMPT, max_tokens=MANY, temperature=0))
        await asyncio.sleep(0.1)
        await zombie.service._check_ownership()
        assert (await running).text == {0: echo_of(PROMPT, MANY)}
        assert (zombie.load["num_pools"], zombie.load["lease_epoch"]) == (0, 0)


async def test_owner_that_cannot_reach_the_bus_is_not_certain(tracing: Tracing) -> None:
    async with deployed(tracing, cache_manager={"lease_s": 0.4}) as deployment:
        owner = deployment.instances["cache_manager-0"]
        owner.waiting.cancel()
        await owner.transport.cut()
        await asyncio.sleep(0.45)
        assert not owner.service._ownership.is_certain
        assert not await owner.service._ownership.check()
        await deployment.start("cache_manager", "cache_manager-1")
        answer = await ask(deployment, PROMPT, max_tokens=9, temperature=0)
        assert answer.text == {0: echo_of(PROMPT, 9)}


async def test_late_answer_of_a_replaced_one_is_ignored(tracing: Tracing, monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployed(tracing) as deployment:
        await ask(deployment, PROMPT, max_tokens=3, temperature=0)
        scheduler = deployment.instances["scheduler-0"].service
        [driven] = scheduler._sessions.values()
        known, request, late = driven._manager_epoch, driven._bus.request, []

        async def answered_late(*arguments: object, **options: object) -> CacheReply:
            reply = await request(*arguments, **options)
            if not late:
                late.append(reply)
                return reply.model_copy(update={"manager_epoch": known - 1, "grants": ()})
            return reply

        monkeypatch.setattr(driven._bus, "request", answered_late)
        answer = await ask(deployment, PROMPT, max_tokens=50, temperature=0)
        assert answer.text == {0: echo_of(PROMPT, 50)}
        assert late
