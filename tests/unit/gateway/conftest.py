"""A gateway over the bus in memory, with a scripted pipeline behind it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from schemas.control import PATH_ROLES
from services.gateway.app import build_app
from services.gateway.response_log import BusResponseLog
from services.gateway.service import BusPipeline, GatewayService
from services.gateway.settings import GatewaySettings, Settings
from services.runtime.bus import Bus
from services.runtime.registry import Heartbeat, Registry
from services.runtime.service import Context
from services.runtime.telemetry import Tracing
from tests.scripted_tokenizer import ScriptedTokenizer
from tests.unit.gateway.gateway_traffic import Served, register, registration


@pytest.fixture
async def registry(memory_bus: Bus) -> AsyncIterator[Registry]:
    """A view in which every service of the path is healthy."""
    await register(memory_bus, [registration(role) for role in PATH_ROLES])
    async with Registry(memory_bus) as view:
        yield view


@pytest.fixture
async def tokenizer(memory_bus: Bus) -> AsyncIterator[ScriptedTokenizer]:
    """What is behind the gateway; set its `script`."""
    async with ScriptedTokenizer(memory_bus) as scripted:
        yield scripted


@pytest.fixture
async def http(
    memory_bus: Bus, registry: Registry, tokenizer: ScriptedTokenizer, tracing: Tracing
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, without a network."""
    settings = Settings(gateway=GatewaySettings(max_body_bytes=64 << 10))
    pipeline = BusPipeline(memory_bus, registry, "smol", 1.0)
    app = build_app(pipeline, settings, tracing, "1.2.3", response_log=BusResponseLog(memory_bus, 1.0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


@pytest.fixture
def serve(memory_bus: Bus, registry: Registry, tokenizer: ScriptedTokenizer, tracing: Tracing) -> Served:
    """Run a gateway on a port of its own: `async with serve(keepalive_s=0.1) as (service, url)`."""

    @asynccontextmanager
    async def running(**fields: Any) -> AsyncIterator[tuple[GatewayService, str]]:
        settings = Settings(gateway=GatewaySettings(**{"port": 0, **fields}))
        heartbeat = Heartbeat(memory_bus, registration("gateway"))
        service = GatewayService(settings, Context(memory_bus, tracing, registry, heartbeat))
        await service.start()
        try:
            yield service, heartbeat.registration.detail
        finally:
            await service.stop()

    return running
