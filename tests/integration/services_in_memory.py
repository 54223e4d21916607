"""A deployment within one event loop: the real services of the path over the bus in memory, without the gateway.

Services are started as their process would start them, and end in both ways: retired (drain, stop) or killed, after
which nothing of them is heard. Every call on the bus gives the loop a turn, as a real connection does.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from schemas.control import Registration, Role
from schemas.errors import Unavailable
from schemas.generation import GenerateRequest
from schemas.subjects import Subjects
from services.cache_manager.service import CacheManagerService
from services.cache_manager.settings import Settings as CacheManagerSettings
from services.executor.service import ExecutorService
from services.executor.settings import Settings as ExecutorSettings
from services.runtime.bus import Bus
from services.runtime.generation import generate
from services.runtime.memory_transport import MemoryServer, MemoryTransport
from services.runtime.registry import Heartbeat, Registry
from services.runtime.service import Context, Service
from services.runtime.settings import CommonSettings
from services.runtime.streams import ensure_streams
from services.runtime.telemetry import Tracing
from services.runtime.transport import Subscription
from services.scheduler.service import SchedulerService
from services.scheduler.settings import Settings as SchedulerSettings
from services.tokenizer.service import TokenizerService
from services.tokenizer.settings import Settings as TokenizerSettings

HEARTBEAT_S = 0.2
SILENT_AFTER_S = 0.8

SERVICES: dict[Role, tuple[type[CommonSettings], Callable[[Any, Context], Service]]] = {
    "cache_manager": (CacheManagerSettings, CacheManagerService),
    "executor": (ExecutorSettings, ExecutorService),
    "scheduler": (SchedulerSettings, SchedulerService),
    "tokenizer": (TokenizerSettings, TokenizerService),
}

QUICK_SCHEDULER = {"lease_s": 1.0, "request_ack_wait_s": 0.6, "step_timeout_s": 0.5, "output_timeout_s": 0.4}


class YieldingTransport(MemoryTransport):
    """A connection whose every call lets others run first, and that can be cut."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self._subscriptions: list[Subscription] = []
        self._is_cut = False

    async def cut(self) -> None:
        """Nothing is sent or received from now on."""
        self._is_cut = True
        for subscription in self._subscriptions:
            await subscription.close()

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        if self._is_cut:
            raise Unavailable("The connection is cut.")

    async def publish(self, *arguments: Any) -> None:
        await self._turn()
        await super().publish(*arguments)

    async def request(self, *arguments: Any) -> Any:
        await self._turn()
        return await super().request(*arguments)

    async def subscribe(self, *arguments: Any) -> Subscription:
        await self._turn()
        subscription = await super().subscribe(*arguments)
        self._subscriptions.append(subscription)
        return subscription

    async def append(self, *arguments: Any) -> Any:
        await self._turn()
        return await super().append(*arguments)

    async def fetch(self, *arguments: Any) -> Any:
        await self._turn()
        return await super().fetch(*arguments)

    async def settle(self, *arguments: Any) -> None:
        await self._turn()
        await super().settle(*arguments)

    async def last(self, *arguments: Any) -> Any:
        await self._turn()
        return await super().last(*arguments)

    async def read(self, *arguments: Any) -> Any:
        await self._turn()
        return await super().read(*arguments)

    async def at(self, *arguments: Any) -> Any:
        await self._turn()
        return await super().at(*arguments)

    async def last_of_each(self, *arguments: Any) -> Any:
        await self._turn()
        return await super().last_of_each(*arguments)


@dataclass
class Instance:
    """One running service."""

    role: Role
    name: str
    service: Any
    context: Context
    transport: YieldingTransport
    waiting: asyncio.Task[None]

    @property
    def load(self) -> dict[str, float]:
        """Its gauges, as the next heartbeat would publish them."""
        return self.context.heartbeat._measured()


async def stop_waiting(instance: Instance) -> None:
    """As the lifecycle does before a drain; raises what ended the service by itself."""
    if instance.waiting.done() and not instance.waiting.cancelled():
        instance.waiting.result()
    instance.waiting.cancel()


@dataclass
class Deployment:
    """The services of one test, by instance name."""

    tracing: Tracing
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    server: MemoryServer = field(default_factory=MemoryServer)
    instances: dict[str, Instance] = field(default_factory=dict)
    num_lives: int = 0

    def bus(self) -> Bus:
        """A new connection, as a client has one."""
        return Bus(YieldingTransport(self.server), Subjects("test"), self.tracing)

    async def start(self, role: Role, name: str) -> Instance:
        """Start one service and wait until it is ready."""
        kind, build = SERVICES[role]
        model = {"source": "builtin:bytes", **self.values.get("model", {})}
        settings = kind.model_validate({"model": model, **self._section(role)})
        bus = self.bus()
        await ensure_streams(bus.transport, bus.subjects, settings.bus)
        self.num_lives += 1
        heartbeat = Heartbeat(
            bus,
            Registration(
                instance=name,
                incarnation=f"life-{self.num_lives}",
                role=role,
                model=settings.model.name,
                state="starting",
                heartbeat_s=HEARTBEAT_S,
                silent_after_s=SILENT_AFTER_S,
            ),
        )
        heartbeat.start()
        registry = await Registry(bus).__aenter__()
        context = Context(bus, self.tracing, registry, heartbeat)
        service: Any = build(settings, context)
        await service.start()
        heartbeat.update(state="ready")
        waiting = asyncio.create_task(service.wait())
        transport = bus.transport
        assert isinstance(transport, YieldingTransport)
        instance = self.instances[name] = Instance(role, name, service, context, transport, waiting)
        return instance

    def _section(self, role: Role) -> dict[str, Any]:
        return {role: self.values[role]} if role in self.values else {}

    async def kill(self, name: str) -> None:
        """End a service as SIGKILL would: no word to anyone."""
        await self.instances[name].transport.cut()
        await self._end(name)

    async def retire(self, name: str) -> None:
        """End a service as SIGTERM would."""
        instance = self.instances[name]
        await stop_waiting(instance)
        instance.context.heartbeat.update(state="draining")
        await instance.service.drain()
        await self._end(name)

    async def _end(self, name: str) -> None:
        instance = self.instances.pop(name)
        await stop_waiting(instance)
        await instance.service.stop()
        await instance.context.heartbeat.leave()
        await instance.context.registry.__aexit__(None, None, None)

    async def close(self) -> None:
        """End everything, the scheduler first."""
        for name in sorted(self.instances, key=lambda name: self.instances[name].role != "scheduler"):
            await self.retire(name)

    async def wait_ready(self) -> None:
        """Wait until the scheduler drives an executor."""
        for instance in self.instances.values():
            await instance.context.registry.wait_ready(SERVICES, 5)
        deadline = time.monotonic() + 5
        while not any(i.load.get("num_executors") for i in self.instances.values()):
            assert time.monotonic() < deadline, "no scheduler drives an executor"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def deployed(tracing: Tracing, *, executors: int = 1, **values: dict[str, Any]) -> AsyncIterator[Deployment]:
    """Run the four services, with `values` for their sections and that of the model."""
    sections = {"scheduler": QUICK_SCHEDULER | values.pop("scheduler", {}), **values}
    sections["executor"] = {"engine": "echo", "num_blocks": 512, "step_time_s": 0.002} | values.get("executor", {})
    deployment = Deployment(tracing, sections)
    try:
        for role in ("cache_manager", "scheduler", "tokenizer"):
            await deployment.start(role, f"{role}-0")
        for number in range(executors):
            await deployment.start("executor", f"executor-{number}")
        await deployment.wait_ready()
        yield deployment
    finally:
        await deployment.close()


@dataclass
class Answer:
    """What one stream said: per choice its tokens, text and end."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    num_final: int = 0
    error: str | None = None
    num_logprobs: int = 0


async def ask(
    deployment: Deployment, prompt: str, *, seen: Callable[[Answer], None] | None = None, **options: Any
) -> Answer:
    """Send a request and read its stream; every delta must begin where the one before ended."""
    request = GenerateRequest.model_validate({"model": "smol", "prompt": prompt, **options})
    answer = Answer()
    async with asyncio.timeout(30), generate(deployment.bus(), request) as stream:
        async for chunk in stream:
            for delta in chunk.choices:
                tokens = answer.tokens.setdefault(delta.index, [])
                assert delta.start == len(tokens), "tokens are repeated or lost"
                tokens.extend(delta.token_ids)
                answer.text[delta.index] = answer.text.get(delta.index, "") + delta.text
                answer.num_logprobs += len(delta.logprobs or ())
                if delta.finish_reason is not None:
                    assert delta.index not in answer.ends
                    answer.ends[delta.index] = delta.finish_reason
            answer.num_final += chunk.final
            answer.error = chunk.error.code if chunk.error is not None else None
            if seen is not None:
                seen(answer)
    return answer


def echo_of(prompt: str, num_tokens: int) -> str:
    """What the echo engine says to a prompt of ASCII."""
    return (prompt * (num_tokens // len(prompt) + 1))[:num_tokens]
