"""One executor, one scheduler: leases are taken, renewed, lost and given back by compare-and-set."""

import pytest

from schemas.control import SchedulerLease
from schemas.errors import Unavailable
from schemas.subjects import Subjects
from services.runtime.bus import Bus
from services.runtime.memory_transport import MemoryServer
from services.runtime.settings import BusSettings
from services.runtime.streams import ensure_streams
from services.runtime.telemetry import Tracing
from services.scheduler.leasing import Leases


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def bus(clock: Clock, tracing: Tracing) -> Bus:
    bus = Bus(MemoryServer(clock=clock).connect(), Subjects("test"), tracing)
    await ensure_streams(bus.transport, bus.subjects, BusSettings())
    return bus


def leases(bus: Bus, scheduler: str = "scheduler-0", incarnation: str = "life-1") -> Leases:
    return Leases(bus, scheduler, incarnation, ttl_s=5.0)


async def test_second_scheduler_waits_until_the_first_expires(bus: Bus, clock: Clock) -> None:
    held = await leases(bus).take("executor-0", "e1")
    assert held is not None
    standby = leases(bus, "scheduler-1")
    assert await standby.take("executor-0", "e1") is None
    clock.now += 5.1
    taken = await standby.take("executor-0", "e1")
    assert taken is not None
    assert taken.epoch > held.epoch
    assert not await leases(bus).renew(held)


async def test_renewal_keeps_the_epoch_and_prolongs(bus: Bus, clock: Clock) -> None:
    held = await leases(bus).take("executor-0", "e1")
    assert held is not None
    epoch = held.epoch
    for _ in range(3):
        clock.now += 3.0
        assert await leases(bus).renew(held)
    assert held.epoch == epoch
    assert await leases(bus, "scheduler-1").take("executor-0", "e1") is None


async def test_restarted_scheduler_takes_its_own_lease_at_once_in_a_higher_epoch(bus: Bus) -> None:
    before = await leases(bus).take("executor-0", "e1")
    after = await leases(bus, incarnation="life-2").take("executor-0", "e1")
    assert before is not None
    assert after is not None
    assert after.epoch > before.epoch
    assert not await leases(bus).renew(before)
    assert await leases(bus, incarnation="life-2").renew(after)


async def test_expired_lease_is_not_renewed(bus: Bus, clock: Clock) -> None:
    held = await leases(bus).take("executor-0", "e1")
    assert held is not None
    clock.now += 5.1
    assert not await leases(bus).renew(held)


async def test_lost_race_is_no_lease(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing_seen(*_: object) -> None:
        return None

    assert await leases(bus, "scheduler-1").take("executor-0", "e1") is not None
    monkeypatch.setattr(bus, "kv_get", nothing_seen)
    assert await leases(bus).take("executor-0", "e1") is None


async def test_lease_given_back_is_free_at_once(bus: Bus) -> None:
    held = await leases(bus).take("executor-0", "e1")
    assert held is not None
    await leases(bus).give_back(held)
    assert await leases(bus, "scheduler-1").take("executor-0", "e1") is not None


async def test_lease_of_another_is_not_given_back(bus: Bus, clock: Clock) -> None:
    held = await leases(bus).take("executor-0", "e1")
    clock.now += 5.1
    taken = await leases(bus, "scheduler-1").take("executor-0", "e1")
    assert held is not None
    assert taken is not None
    await leases(bus).give_back(held)
    entry = await bus.kv_get(bus.subjects.leases, "executor-0", SchedulerLease)
    assert entry is not None
    assert entry.message.scheduler == "scheduler-1"
    assert await leases(bus, "scheduler-1").renew(taken)


async def test_silent_bus_is_no_reason_to_let_go(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    held = await leases(bus).take("executor-0", "e1")
    assert held is not None
    await bus.close()
    assert await leases(bus).renew(held)
    await leases(bus).give_back(held)
    assert "not given back" in caplog.text
    with pytest.raises(Unavailable):
        await leases(bus).take("executor-0", "e1")
