"""One behaviour of key-value buckets, over NATS and in memory: values, revisions, expiry, changes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from schemas.control import SchedulerLease
from schemas.errors import Conflict
from services.runtime.bus import Bus

Eventually = Callable[..., Awaitable[None]]
Connect = Callable[..., Awaitable[Bus]]
EXPIRY_S = 5.0
"""A time-to-live of one second has ended by then: servers expire a little late."""


def lease(scheduler: str) -> SchedulerLease:
    return SchedulerLease(executor="e", scheduler=scheduler, scheduler_incarnation="i", executor_incarnation="j")


async def value(bus: Bus, key: str = "e") -> str | None:
    stored = await bus.kv_get(bus.subjects.leases, key, SchedulerLease)
    return None if stored is None else stored.message.scheduler


async def nothing() -> None:
    """Do nothing meanwhile."""


async def absent(bus: Bus, bucket: str, key: str, *, meanwhile: Callable[[], Awaitable[object]] = nothing) -> None:
    """Wait until a key has expired."""
    async with asyncio.timeout(EXPIRY_S):
        while await bus.kv_get(bucket, key, SchedulerLease) is not None:
            await meanwhile()
            await asyncio.sleep(0.1)


async def test_value_is_read_back_with_its_revision(bus: Bus) -> None:
    bucket = bus.subjects.leases
    assert await bus.kv_get(bucket, "e", SchedulerLease) is None
    first = await bus.kv_put(bucket, "e", lease("a"))
    second = await bus.kv_put(bucket, "e", lease("b"))
    assert second > first
    stored = await bus.kv_get(bucket, "e", SchedulerLease)
    assert stored is not None
    assert (stored.message, stored.sequence) == (lease("b"), second)


async def test_update_succeeds_only_at_the_known_revision(bus: Bus) -> None:
    bucket = bus.subjects.leases
    first = await bus.kv_update(bucket, "e", lease("a"), revision=0)
    with pytest.raises(Conflict):
        await bus.kv_update(bucket, "e", lease("b"), revision=0)
    second = await bus.kv_update(bucket, "e", lease("b"), revision=first)
    with pytest.raises(Conflict):
        await bus.kv_update(bucket, "e", lease("c"), revision=first)
    assert second > first
    assert await value(bus) == "b"


async def test_of_concurrent_updates_exactly_one_wins(bus: Bus, connect_bus: Connect) -> None:
    revision = await bus.kv_put(bus.subjects.leases, "e", lease("old"))
    contenders = [bus, await connect_bus(), await connect_bus()]
    results = await asyncio.gather(
        *(
            contender.kv_update(bus.subjects.leases, "e", lease(str(number)), revision=revision)
            for number, contender in enumerate(contenders)
        ),
        return_exceptions=True,
    )
    winners = [number for number, result in enumerate(results) if isinstance(result, int)]
    assert len(winners) == 1
    assert await value(bus) == str(winners[0])


async def test_deleted_key_is_absent_and_can_be_put_again(bus: Bus) -> None:
    bucket = bus.subjects.leases
    await bus.kv_put(bucket, "e", lease("a"))
    await bus.kv_delete(bucket, "e")
    assert await value(bus) is None
    assert await bus.kv_entries(bucket, SchedulerLease) == []
    await bus.kv_put(bucket, "e", lease("b"))
    assert await value(bus) == "b"


async def test_deleted_key_can_be_created_by_an_update(bus: Bus) -> None:
    bucket = bus.subjects.leases
    await bus.kv_put(bucket, "e", lease("a"))
    await bus.kv_delete(bucket, "e")
    await bus.kv_update(bucket, "e", lease("b"), revision=0)
    assert await value(bus) == "b"


async def test_entries_are_the_newest_values_of_all_keys(bus: Bus) -> None:
    bucket = bus.subjects.config  # keeps a history of values
    for key, name in (("e0", "old"), ("e1", "b"), ("e0", "a"), ("e2", "gone")):
        await bus.kv_put(bucket, key, lease(name))
    await bus.kv_delete(bucket, "e2")
    entries = await bus.kv_entries(bucket, SchedulerLease)
    assert sorted(entry.message.scheduler for entry in entries) == ["a", "b"]


async def test_entry_with_a_time_to_live_vanishes_unless_it_is_put_again(bus: Bus) -> None:
    bucket = bus.subjects.registry
    await bus.kv_put(bucket, "dies", lease("a"), ttl_s=1)
    await bus.kv_put(bucket, "stays", lease("b"))
    await absent(bus, bucket, "dies", meanwhile=lambda: bus.kv_put(bucket, "beats", lease("c"), ttl_s=1))
    entries = await bus.kv_entries(bucket, SchedulerLease)
    assert sorted(entry.message.scheduler for entry in entries) == ["b", "c"]


async def test_expired_key_is_absent_and_can_be_created_again(bus: Bus) -> None:
    bucket = bus.subjects.leases
    await bus.kv_put(bucket, "e", lease("a"), ttl_s=1)
    assert await value(bus) == "a"
    await absent(bus, bucket, "e")
    await bus.kv_update(bucket, "e", lease("b"), revision=0)
    assert await value(bus) == "b"


async def test_entry_of_another_version_does_not_hide_the_others(bus: Bus) -> None:
    bucket = bus.subjects.registry
    await bus.kv_put(bucket, "good", lease("a"))
    await bus.transport.append(f"$KV.{bucket}.newer", b"{}", {"Nj-Schema": "scheduler_lease/2"})
    assert [entry.message.scheduler for entry in await bus.kv_entries(bucket, SchedulerLease)] == ["a"]


async def test_changes_are_told_in_order(bus: Bus, connect_bus: Connect, eventually: Eventually) -> None:
    bucket = bus.subjects.registry
    seen: list[str] = []
    subscription = await bus.kv_listen(
        bucket,
        SchedulerLease,
        lambda key, value: seen.append(f"{key}={value.scheduler}"),
        lambda key: seen.append(f"{key} left"),
    )
    await bus.transport.flush()
    other = await connect_bus()
    await other.kv_put(bucket, "e", lease("a"))
    await other.kv_put(bucket, "f", lease("b"), ttl_s=5)
    await other.kv_delete(bucket, "e")
    await eventually(lambda: len(seen) == 3)
    assert seen == ["e=a", "f=b", "e left"]
    await subscription.close()


async def test_unreadable_change_is_logged_and_the_next_one_is_told(
    bus: Bus, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = bus.subjects.registry
    seen: list[str] = []
    with caplog.at_level(logging.WARNING):
        await bus.kv_listen(bucket, SchedulerLease, lambda key, value: seen.append(key), seen.append)
        await bus.transport.append(f"$KV.{bucket}.bad", b"{", {})
        await bus.kv_put(bucket, "good", lease("a"))
        await eventually(lambda: seen == ["good"])
    assert "ignored the entry bad" in caplog.text
