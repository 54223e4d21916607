"""Each service, killed while nothing runs, is back for the next request; tests/faults kills them in mid-stream."""

import asyncio
import os
import signal
from collections.abc import Callable

from opentelemetry.sdk.trace import TracerProvider

from schemas.control import PATH_ROLES, Role
from schemas.generation import GenerateRequest
from services.runtime.bus import Bus, open_bus
from services.runtime.generation import generate
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.integration.conftest import Deployment

BASE_TOKENS = 150
STREAM_TIMEOUT_S = 60.0


def wanted(prompt: str, num_tokens: int) -> str:
    """The echo engine repeats the prompt."""
    return (prompt * (num_tokens // len(prompt) + 1))[:num_tokens]


async def stream(bus: Bus, number: int) -> tuple[str, str]:
    """Return the text that came, and the one that should have."""
    prompt, num_tokens = f"stream {number} repeats; ", BASE_TOKENS + number
    request = GenerateRequest(model="smol", prompt=prompt, max_tokens=num_tokens, temperature=0, stop=("never",))
    text = ""
    async with asyncio.timeout(STREAM_TIMEOUT_S), generate(bus, request) as generation:
        async for chunk in generation:
            assert chunk.error is None, chunk.error
            text += "".join(choice.text for choice in chunk.choices)
    return text, wanted(prompt, num_tokens)


def pid_of(registry: Registry, role: Role) -> int:
    """Return the process id of the one instance of a role."""
    return next(entry.registration.pid for entry in registry.entries() if entry.registration.role == role)


async def test_each_service_killed_while_idle_is_restarted_and_the_next_request_works(
    start_echo: Callable[..., Deployment],
) -> None:
    deployment = start_echo()
    settings = BusSettings(url=deployment.nats_url, prefix=deployment.prefix)
    async with open_bus(settings, Tracing(TracerProvider()), name="test") as bus, Registry(bus) as registry:
        for number, role in enumerate((*PATH_ROLES, "gateway")):
            await registry.wait_ready((*PATH_ROLES, "gateway"), 30)
            killed = pid_of(registry, role)
            os.kill(killed, signal.SIGKILL)
            text, expected = await stream(bus, number)
            assert text == expected
            async with asyncio.timeout(30):
                while pid_of(registry, role) == killed or registry.missing((role,)):
                    await asyncio.sleep(0.05)
