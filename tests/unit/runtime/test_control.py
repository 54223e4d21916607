"""Commands of an operator on the bus: who answers, what is said, and that every answer names its instance."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from schemas.control import ControlRequest, Registration
from schemas.errors import Unavailable
from services.runtime.bus import Bus
from services.runtime.control import Command, ControlServer, ask_all


def own(instance: str, role: Any = "scheduler") -> Registration:
    return Registration(instance=instance, incarnation="life-1", role=role, model="smol", state="ready")


def serving(bus: Bus, instance: str, commands: Mapping[str, Command]) -> ControlServer:
    return ControlServer(bus, own(instance), commands)


async def count(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"counted": len(arguments)}


async def ask(bus: Bus, command: str, *expected: str, **request: Any) -> list[Any]:
    message = ControlRequest(command=command, **request)
    return await ask_all(bus, "scheduler", message, expected=expected, timeout_s=0.5)


async def test_every_instance_of_the_role_answers_in_its_own_name(bus: Bus) -> None:
    async with (
        serving(bus, "scheduler-1", {"count": count}),
        serving(bus, "scheduler-0", {"count": count}),
        ControlServer(bus, own("executor-0", "executor"), {"count": count}),
    ):
        await bus.transport.flush()
        replies = await ask(bus, "count", "scheduler-0", "scheduler-1", arguments={"a": 1, "b": None})
    assert [(reply.instance, reply.result) for reply in replies] == [
        ("scheduler-0", {"counted": 2}),
        ("scheduler-1", {"counted": 2}),
    ]


async def test_one_instance_alone_can_be_asked(bus: Bus) -> None:
    async with serving(bus, "scheduler-1", {"count": count}), serving(bus, "scheduler-0", {"count": count}):
        await bus.transport.flush()
        replies = await ask(bus, "count", "scheduler-1", "nobody", instance="scheduler-1")
    assert [reply.instance for reply in replies] == ["scheduler-1"]


async def test_unknown_command_a_refusal_and_a_bug_are_coded_errors_of_the_instance(bus: Bus) -> None:
    async def refuse(arguments: Mapping[str, Any]) -> dict[str, Any]:
        raise Unavailable("Not now.")

    async def bug(arguments: Mapping[str, Any]) -> dict[str, Any]:
        raise KeyError("secret")

    async with serving(bus, "scheduler-0", {"refuse": refuse, "bug": bug}):
        await bus.transport.flush()
        errors = []
        for command in ("from a newer version", "refuse", "bug"):
            [reply] = await ask(bus, command, "scheduler-0")
            assert reply.error is not None
            errors.append(reply.error)
    assert [error.code for error in errors] == ["invalid_request", "service_unavailable", "internal_error"]
    assert "bug, refuse" in errors[0].message
    assert "secret" not in errors[2].message


async def test_who_does_not_answer_is_waited_for_until_the_deadline_only(bus: Bus) -> None:
    async with serving(bus, "scheduler-0", {"count": count}):
        await bus.transport.flush()
        began_s = time.monotonic()
        replies = await ask(bus, "count", "scheduler-0", "scheduler-1")
        assert 0.4 < time.monotonic() - began_s < 5
    assert [reply.instance for reply in replies] == ["scheduler-0"]
    assert await ask(bus, "count", "scheduler-0") == []  # nobody listens any more


async def test_command_that_ends_its_server_is_answered(bus: Bus) -> None:
    ended = asyncio.Event()

    async def leave(arguments: Mapping[str, Any]) -> dict[str, Any]:
        ended.set()
        await asyncio.sleep(0.05)
        return {"state": "draining"}

    server = await serving(bus, "scheduler-0", {"leave": leave}).__aenter__()
    await bus.transport.flush()
    asking = asyncio.create_task(ask(bus, "leave", "scheduler-0"))
    await ended.wait()
    await server.__aexit__(None, None, None)
    [reply] = await asking
    assert reply.result == {"state": "draining"}
