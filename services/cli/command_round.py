"""One command, to everyone whom it concerns: who that is, what they answered, and who did not."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import JsonValue

from schemas.control import COMMANDS, ControlReply, ControlRequest, Registration, Role
from schemas.errors import NatterjackError
from services.cli.recorded import running_deployment
from services.runtime.bus import Bus
from services.runtime.control import ask_all
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings

EXIT_DONE, EXIT_REFUSED, EXIT_USAGE, EXIT_SILENT = 0, 1, 2, 3
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Order:
    """What to tell whom. `wait_s`: how long to wait, after the answers, for the lives that were told to end."""

    command: str
    target: str
    arguments: dict[str, JsonValue] = field(default_factory=dict)
    timeout_s: float = 5.0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an order; `error` is for a person."""

    order: Order
    exit_code: int
    replies: tuple[ControlReply, ...] = ()
    missing: tuple[str, ...] = ()
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "command": self.order.command,
            "ok": self.exit_code == EXIT_DONE,
            "replies": [reply.model_dump(mode="json") for reply in self.replies],
            "missing": list(self.missing),
            "error": self.error or None,
        }


async def carry_out(settings: BusSettings, order: Order) -> Outcome:
    """Send the order to the running deployment and gather the answers."""
    if order.command == "drain" and not order.target:
        return Outcome(order, EXIT_USAGE, error="say which role or instance is to be drained.")
    if order.command not in COMMANDS:
        known = ", ".join(sorted(COMMANDS)).replace("_", "-")
        return Outcome(order, EXIT_USAGE, error=f"there is no command {order.command!r}; there are: {known}.")
    try:
        async with running_deployment(settings) as bus, Registry(bus) as registry:
            return await _on_bus(bus, registry, order)
    except NatterjackError as error:
        return Outcome(order, EXIT_SILENT, error=error.message)


async def _on_bus(bus: Bus, registry: Registry, order: Order) -> Outcome:
    present = [entry.registration for entry in registry.entries() if entry.is_healthy]
    addressed = _addressed(present, order)
    if addressed is None:
        known = ", ".join([*get_args(Role), *sorted(one.instance for one in present)])
        return Outcome(order, EXIT_USAGE, error=f"there is no {order.target!r}; there are: {known}.")
    if not addressed:
        return Outcome(order, EXIT_SILENT, error=f"no {order.target or 'service'} is running.")
    request = ControlRequest(
        command=order.command,
        instance=None if order.target in ("", *_ROLE_NAMES) else order.target,
        arguments=order.arguments,
    )
    answers = await asyncio.gather(
        *(
            ask_all(bus, role, request, expected=names, timeout_s=order.timeout_s)
            for role, names in _by_role(addressed).items()
        )
    )
    replies = tuple(reply for some in answers for reply in some)
    missing = tuple(sorted({one.instance for one in addressed} - {reply.instance for reply in replies}))
    if missing:
        return Outcome(order, EXIT_SILENT, replies, missing, f"no answer from {', '.join(missing)}.")
    if any(reply.error is not None for reply in replies):
        return Outcome(order, EXIT_REFUSED, replies)
    staying = await _wait_gone(registry, addressed, order.wait_s) if order.wait_s else ()
    if staying:
        return Outcome(order, EXIT_SILENT, replies, staying, f"still there: {', '.join(staying)}.")
    return Outcome(order, EXIT_DONE, replies)


_ROLE_NAMES: dict[str, Role] = {name: role for role in get_args(Role) for name in (role, role.replace("_", "-"))}


def _addressed(present: list[Registration], order: Order) -> list[Registration] | None:
    """Return whom the order is for; None when nothing is called so."""
    if not order.target:
        return [one for one in present if one.role in COMMANDS[order.command]]
    if (role := _ROLE_NAMES.get(order.target)) is not None:
        return [one for one in present if one.role == role]
    return [one for one in present if one.instance == order.target] or None


def _by_role(addressed: list[Registration]) -> dict[Role, list[str]]:
    roles: dict[Role, list[str]] = {}
    for one in addressed:
        roles.setdefault(one.role, []).append(one.instance)
    return roles


async def _wait_gone(registry: Registry, lives: list[Registration], timeout_s: float) -> tuple[str, ...]:
    """Wait until none of these lives is left; return the instances of those that are."""
    deadline_s = time.monotonic() + timeout_s
    ended = {one.incarnation: one.instance for one in lives}
    while True:
        there = {entry.registration.incarnation for entry in registry.entries()}
        left = tuple(sorted(name for incarnation, name in ended.items() if incarnation in there))
        if not left or time.monotonic() >= deadline_s:
            return left
        await asyncio.sleep(POLL_S)
