"""The gateway as a service: the HTTP server in the common life of services, and the pipeline as the bus shows it."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Sequence

import uvicorn

from schemas.control import PATH_ROLES
from schemas.errors import InternalError
from schemas.generation import GenerateRequest
from schemas.openai import Model
from schemas.output import OutputChunk
from schemas.tokenization import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from services.gateway.api_keys import ApiKeys
from services.gateway.app import build_app
from services.gateway.metered_pipeline import MeteredPipeline
from services.gateway.pipeline import Generation
from services.gateway.response_log import BusResponseLog
from services.gateway.settings import GatewaySettings, Settings
from services.runtime.bus import Bus
from services.runtime.control import Command
from services.runtime.generation import finish_cancelling, generate
from services.runtime.registry import Registry
from services.runtime.service import Context, StartFailed, version
from services.runtime.stream_watch import StreamWatch

log = logging.getLogger(__name__)

IDLE_CONNECTION_S = 75
"""Longer than the minute that clients and proxies keep idle connections, so that they are the ones to close them."""
BACKLOG = 1024
MAX_ATTEMPTS = 16
"""After so many failures of a request with an idempotency key, its last error is repeated."""


class BusPipeline:
    """The pipeline behind the bus."""

    def __init__(self, bus: Bus, registry: Registry, own_model: str, accept_timeout_s: float) -> None:
        self._bus = bus
        self._registry = registry
        self._own_model = own_model
        self._accept_timeout_s = accept_timeout_s
        self.is_leaving = False
        """Whether it is this gateway that goes, not its clients: what they began stays wanted, at another one."""

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Yield the generation once a tokenizer has accepted the request."""
        async with generate(
            self._bus, request, accept_timeout_s=self._accept_timeout_s, stays_wanted=lambda: self.is_leaving
        ) as generation:
            if generation.accepted is None:
                raise InternalError("A generation began without being accepted.")
            yield Generation(generation.accepted, aiter(generation))

    async def usable_id(self, base: str) -> str:
        """Pass over outputs that ended with an error, so that a repeated request is tried again."""
        subjects = self._bus.subjects
        for attempt in range(MAX_ATTEMPTS):
            name = f"{base}-{attempt}"
            last = await self._bus.last(subjects.out_stream, subjects.out(name), OutputChunk)
            if last is None or last.message.error is None:
                return name
        return f"{base}-{MAX_ATTEMPTS}"

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Ask any tokenizer of the model for a prompt's tokens."""
        subject = self._bus.subjects.tokenize(request.model or self._own_model)
        return await self._bus.request(subject, request, TokenizeReply, timeout_s=self._accept_timeout_s)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """Ask any tokenizer of the model for the text of tokens."""
        subject = self._bus.subjects.detokenize(request.model or self._own_model)
        return await self._bus.request(subject, request, DetokenizeReply, timeout_s=self._accept_timeout_s)

    def models(self) -> Sequence[Model]:
        """Return the configured model, and every other that somebody is registered for."""
        models = {name: Model(id=name) for name in sorted(self._registry.models() | {self._own_model})}
        for entry in self._registry.entries():
            one = entry.registration
            if one.capacity is not None:
                created, length = int(one.started_s), one.capacity.max_model_len
                models[one.model] = Model(id=one.model, created=created, max_model_len=length)
        return tuple(models.values())

    def missing_roles(self) -> Sequence[str]:
        """Return the services of the path that have no healthy instance."""
        return self._registry.missing(PATH_ROLES)


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the lifecycle owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayService:
    """Serves HTTP from start to stop."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self._settings = settings.gateway
        self._context = context
        accept_timeout_s = settings.gateway.accept_timeout_s
        self._pipeline = BusPipeline(context.bus, context.registry, settings.model.name, accept_timeout_s)
        metered = MeteredPipeline(self._pipeline, context.metrics)
        self._keys = api_keys_of(settings.gateway)
        self._responses = BusResponseLog(context.bus, accept_timeout_s, metered.meter)
        app = build_app(metered, settings, context.tracing, version(), context.metrics, self._keys, self._responses)
        self._server = _HttpServer(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=IDLE_CONNECTION_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None
        self._streams = StreamWatch(context.bus, context.metrics)
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take the port, or raise StartFailed that says what is wrong with it; return when connections are accepted."""
        try:
            self._keys.load()
        except (OSError, UnicodeDecodeError) as error:
            raise StartFailed(f"The API keys in gateway.api_keys_file cannot be read: {error}.") from None
        listener = open_listener(self._settings.host, self._settings.port)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._context.progress("serving HTTP", detail=url)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise StartFailed("The HTTP server ended at its start.")
            await asyncio.sleep(0.005)
        log.info("serving HTTP on %s", url)
        self._watching = asyncio.create_task(self._streams.run(), name="streams")

    async def wait(self) -> None:
        """Return when the HTTP server ends by itself, which is a failure."""
        if self._serving is not None:
            await asyncio.shield(self._serving)
        raise StartFailed("The HTTP server ended unexpectedly.")

    async def drain(self) -> None:
        """Accept no more connections; return when the open requests are answered."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.shield(self._serving)

    def commands(self) -> dict[str, Command]:
        """Nothing beyond what every service can be told."""
        return {}

    async def stop(self) -> None:
        """Cut what is still open: its clients go on at another gateway; and let cancellations of before leave."""
        self._pipeline.is_leaving = True
        if self._watching is not None:
            self._watching.cancel()
        self._server.should_exit = self._server.force_exit = True
        requests = list(self._server.server_state.tasks)
        for task in requests:
            task.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await self._responses.close()
        await finish_cancelling()


def api_keys_of(settings: GatewaySettings) -> ApiKeys:
    """Return the keys that clients need."""
    given = settings.api_keys.get_secret_value() if settings.api_keys is not None else ""
    return ApiKeys(filter(None, map(str.strip, given.split(","))), settings.api_keys_file)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises StartFailed when the port is taken, or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartFailed(
            f"Cannot serve HTTP on {host} port {port}: {error.strerror or error}. "
            "Stop what uses it, or choose another with --set gateway.port=PORT."
        ) from None
