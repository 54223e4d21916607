"""What the gateway's tests send, and how they read what comes back."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from schemas.control import Registration, Role
from services.gateway.service import GatewayService
from services.runtime.bus import Bus

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}

Served = Callable[..., AbstractAsyncContextManager[tuple[GatewayService, str]]]


def registration(role: Role, instance: str = "", **fields: Any) -> Registration:
    """One healthy instance."""
    return Registration(
        instance=instance or f"{role}-0",
        incarnation="life",
        role=role,
        **{"model": "smol", "state": "ready", "started_s": time.time(), **fields},
    )


def events(text: str) -> list[Any]:
    """The data of a response's server-sent events, decoded, with the closing marker as it is."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


async def register(bus: Bus, entries: Sequence[Registration]) -> None:
    """Put instances into the registry."""
    for entry in entries:
        await bus.kv_put(bus.subjects.registry, entry.instance, entry, ttl_s=entry.heartbeat_s)
    await bus.transport.flush()
