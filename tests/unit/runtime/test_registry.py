"""The registry view: who counts as healthy, for how long, and what it tells its listeners."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from schemas.control import PATH_ROLES, Registration, Role
from schemas.errors import Unavailable
from schemas.subjects import subject_token
from services.runtime.bus import Bus
from services.runtime.registry import MIN_BEATS, SILENCES_TO_VANISH, Heartbeat, Registry

Eventually = Callable[..., Awaitable[None]]
SILENT_AFTER_S = 4.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def registration(instance: str = "executor-0", **changes: Any) -> Registration:
    values = {
        "incarnation": "i",
        "role": "executor",
        "model": "smol",
        "state": "ready",
        "heartbeat_s": 1.0,
        "silent_after_s": SILENT_AFTER_S,
    }
    return Registration.model_validate({"instance": instance, **values, **changes})


async def put(bus: Bus, entry: Registration) -> None:
    await bus.kv_put(bus.subjects.registry, subject_token(entry.instance), entry)
    await asyncio.sleep(0)


async def test_entries_from_before_and_after_are_seen(memory_bus: Bus) -> None:
    await put(memory_bus, registration("b"))
    async with Registry(memory_bus) as registry:
        await put(memory_bus, registration("a.1", state="starting", stage="loading model"))
        entries = registry.entries()
        assert [entry.registration.instance for entry in entries] == ["a.1", "b"]
        assert [entry.is_healthy for entry in entries] == [False, True]
        assert [found.instance for found in registry.healthy("executor")] == ["b"]
        assert registry.models() == {"smol"}


async def test_silent_instance_is_not_healthy_and_later_forgotten(memory_bus: Bus) -> None:
    clock = Clock()
    async with Registry(memory_bus, clock=clock) as registry:
        await put(memory_bus, registration())
        clock.now += SILENT_AFTER_S
        assert registry.missing(["executor"]) == []
        clock.now += 0.01
        (entry,) = registry.entries()
        assert not entry.is_healthy
        assert entry.age_s == pytest.approx(SILENT_AFTER_S + 0.01)
        assert registry.missing(["executor"]) == ["executor"]
        await put(memory_bus, registration())
        assert registry.missing(["executor"]) == []
        clock.now += SILENCES_TO_VANISH * SILENT_AFTER_S + 0.01
        assert registry.entries() == []


@pytest.mark.parametrize("state", ["starting", "draining", "failed"])
async def test_only_ready_instances_are_healthy(memory_bus: Bus, state: str) -> None:
    async with Registry(memory_bus) as registry:
        await put(memory_bus, registration(state=state))
        assert registry.healthy("executor") == []
        assert len(registry.entries()) == 1


async def test_roles_without_a_healthy_instance_are_missing(memory_bus: Bus) -> None:
    async with Registry(memory_bus) as registry:
        await put(memory_bus, registration())
        assert registry.missing(PATH_ROLES) == ["tokenizer", "scheduler", "cache_manager"]


async def test_listeners_hear_of_beats_and_departures(memory_bus: Bus) -> None:
    heard: list[tuple[str, bool]] = []
    async with Registry(memory_bus) as registry:
        registry.listen(lambda entry, instance: heard.append((instance, entry is not None)))
        await put(memory_bus, registration("x/y"))
        await memory_bus.kv_delete(memory_bus.subjects.registry, subject_token("x/y"))
        await asyncio.sleep(0)
        assert registry.entries() == []
    await put(memory_bus, registration("after the view was closed"))
    assert heard == [("x/y", True), ("x/y", False)]


async def test_waiting_ends_when_every_role_is_ready(memory_bus: Bus) -> None:
    roles: list[Role] = ["tokenizer", "executor"]
    async with Registry(memory_bus) as registry:
        waiting = asyncio.create_task(registry.wait_ready(roles, 5))
        await put(memory_bus, registration())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await put(memory_bus, registration("tokenizer-0", role="tokenizer"))
        await asyncio.wait_for(waiting, 1)


async def test_waiting_too_long_names_what_is_missing(memory_bus: Bus) -> None:
    async with Registry(memory_bus) as registry:
        await put(memory_bus, registration())
        with pytest.raises(Unavailable, match=r"0\.05 s: tokenizer\.") as caught:
            await registry.wait_ready(["tokenizer", "executor"], 0.05)
        assert "executor" not in caught.value.message


async def test_after_a_reconnection_the_bucket_is_read_again(
    memory_bus: Bus, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks: list[Callable[[], None]] = []
    monkeypatch.setattr(memory_bus.transport, "on_reconnect", callbacks.append)
    async with Registry(memory_bus) as registry:
        assert registry._subscription is not None
        await registry._subscription.close()  # changes are missed while the connection is down
        await put(memory_bus, registration("missed"))
        assert registry.entries() == []
        callbacks[0]()
        await eventually(registry.entries)

        async def fail(*arguments: object) -> None:
            raise Unavailable("The bus is away again.")

        monkeypatch.setattr(memory_bus, "kv_entries", fail)
        callbacks[0]()
        await eventually(lambda: "could not be read again" in caplog.text)
        assert len(registry.entries()) == 1


async def test_view_can_be_opened_before_the_bucket_exists(memory_bus: Bus) -> None:
    del memory_bus.transport._server.streams[f"KV_{memory_bus.subjects.registry}"]  # type: ignore[attr-defined]
    async with Registry(memory_bus) as registry:
        assert registry.entries() == []


async def test_heartbeat_publishes_changes_at_once_and_repeats_the_rest(
    memory_bus: Bus, eventually: Eventually
) -> None:
    seen: list[Registration] = []
    await memory_bus.kv_listen(
        memory_bus.subjects.registry, Registration, lambda key, entry: seen.append(entry), lambda key: None
    )
    beats = Heartbeat(memory_bus, registration(heartbeat_s=60.0, state="starting"))
    beats.measure_load(lambda: {"num_requests_running": 3.0})
    beats.start()
    await eventually(lambda: len(seen) == 1)
    beats.update(stage="loading model", progress=0.5)
    await eventually(lambda: len(seen) == 2)
    assert (seen[1].stage, seen[1].progress, seen[1].load) == ("loading model", 0.5, {"num_requests_running": 3.0})
    assert beats.registration.stage == "loading model"
    beats.update(heartbeat_s=0.01)
    await eventually(lambda: len(seen) >= 5)
    await beats.leave()
    assert await memory_bus.kv_entries(memory_bus.subjects.registry, Registration) == []
    count = len(seen)
    await asyncio.sleep(0.05)
    assert len(seen) == count


async def test_heartbeat_outlives_a_bus_that_is_away(
    memory_bus: Bus, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    beats = Heartbeat(memory_bus, registration(heartbeat_s=0.01))
    memory_bus.transport.state.is_connected = False
    beats.start()
    await eventually(lambda: caplog.text.count("heartbeat failed") >= 2)
    memory_bus.transport.state.is_connected = True
    async with Registry(memory_bus) as registry:
        await eventually(lambda: registry.missing(["executor"]) == [])
    memory_bus.transport.state.is_connected = False
    await beats.leave()
    assert "could not leave the registry" in caplog.text


async def test_heartbeat_stays_alive_when_the_load_cannot_be_measured(memory_bus: Bus, eventually: Eventually) -> None:
    def broken() -> dict[str, float]:
        raise ZeroDivisionError

    beats = Heartbeat(memory_bus, registration(heartbeat_s=0.01))
    beats.measure_load(broken)
    beats.start()
    async with Registry(memory_bus) as registry:
        await eventually(lambda: registry.missing(["executor"]) == [])
    await beats.leave()


async def test_instance_that_beats_more_seldom_than_it_says_is_given_some_beats(memory_bus: Bus) -> None:
    clock = Clock()
    async with Registry(memory_bus, clock=clock) as registry:
        await put(memory_bus, registration(heartbeat_s=10.0, silent_after_s=1.0))
        clock.now += MIN_BEATS * 10.0
        assert registry.missing(["executor"]) == []
        clock.now += 0.01
        assert registry.missing(["executor"]) == ["executor"]
