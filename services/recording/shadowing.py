"""Mirrors a part of the live requests to a second pipeline and compares what both answer. An edge module.

A shadow is one more subscriber of the live pipeline: it hears requests, work items and cancellations, reads the output
of those that it mirrors from their logs, and sends nothing but requests and cancellations to the other prefix. So a
client cannot notice it, and a shadow that is slow or dead costs nobody anything.

A request is mirrored when its work item says that it was accepted, with its id and the seed that it was given; so what
was refused is not mirrored. Which ones are decided by their ids alone.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import ValidationError

from schemas.codec import decode
from schemas.errors import NatterjackError
from schemas.generation import GenerateRequest, WorkItem
from schemas.subjects import raw_of
from services.recording.agreement import Agreement, Verdict
from services.recording.outcomes import Outcome
from services.recording.replay_plan import seed_of
from services.runtime.bus import Bus
from services.runtime.generation import Generation, generate
from services.runtime.transport import MESSAGE_ID_HEADER, RawMessage, Subscription

log = logging.getLogger(__name__)

MAX_HELD = 4096
"""Requests whose work item has not come, and the reverse: two subscriptions have no common order."""
MAX_SEEN = 100_000
HASH_RANGE = 2**64
ACCEPT_TIMEOUT_S = 10.0

Ask = dict[str, Any]


def is_chosen(request_id: str, fraction: float) -> bool:
    """Tell whether a request belongs to the mirrored part: the same ones whenever and wherever it is asked."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * HASH_RANGE


@dataclass(frozen=True, slots=True)
class ShadowLimits:
    """How much is mirrored (`fraction`, of all), how many requests at a time, how long one may take, by which name."""

    fraction: float
    max_open: int = 32
    limit_s: float = 300.0
    model: str | None = None


@dataclass(slots=True)
class _Mirrored:
    """One request on both sides."""

    live: Outcome
    other: Outcome
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class Shadow:
    """The mirror between two buses; use it as an async context manager. `agreement` says how it goes."""

    def __init__(
        self,
        live: Bus,
        other: Bus,
        limits: ShadowLimits,
        agreement: Agreement,
        compared: Callable[[Verdict | None, Outcome, Outcome], None] = lambda verdict, live, other: None,
    ) -> None:
        self.agreement = agreement
        self._live = live
        self._other = other
        self._limits = limits
        self._compared = compared
        self._asked: OrderedDict[str, Ask] = OrderedDict()
        self._accepted: OrderedDict[str, WorkItem] = OrderedDict()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._open: dict[str, _Mirrored] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []

    @property
    def num_open(self) -> int:
        """Requests that run on both sides, or on one of them still."""
        return len(self._open)

    async def __aenter__(self) -> "Shadow":
        subjects, transport = self._live.subjects, self._live.transport
        for pattern, receive in (
            (subjects.all_of("generate"), self._hear_request),
            (subjects.work_all, self._hear_work),
            (subjects.cancel_all, self._hear_cancel),
        ):
            self._subscriptions.append(await transport.subscribe(pattern, receive))
        await transport.flush()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for subscription in self._subscriptions:
            with contextlib.suppress(NatterjackError):
                await subscription.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def settle(self, timeout_s: float) -> None:
        """Mirror nothing new, and give what runs time to end."""
        for subscription in self._subscriptions:
            with contextlib.suppress(NatterjackError):
                await subscription.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    # ---- what is heard of the live pipeline

    def _hear_request(self, raw: RawMessage) -> None:
        """A request is known by its id, or by where its answer goes when its tokenizer has to name it."""
        try:
            asked = orjson.loads(raw.body)
        except orjson.JSONDecodeError:
            return
        if not isinstance(asked, dict) or asked.get("resume"):
            return
        given = asked.get("request_id")
        name = given if isinstance(given, str) and given else raw.reply
        if name is None or (name == given and not is_chosen(name, self._limits.fraction)):
            return
        if (work := self._accepted.pop(name, None)) is not None:
            self._begin(asked, work)
        else:
            _keep(self._asked, name, asked)

    def _hear_work(self, raw: RawMessage) -> None:
        named = raw.headers.get(MESSAGE_ID_HEADER)
        if named is not None and not is_chosen(raw_of(named), self._limits.fraction):
            return  # without reading it: most are none of ours
        try:
            work = decode(WorkItem, raw.headers, raw.body)
        except NatterjackError as error:
            log.warning("a work item cannot be read: %s", error.message)
            return
        names = (work.request_id, work.output.reply or work.request_id)
        asked = next((found for name in names if (found := self._asked.pop(name, None)) is not None), None)
        if not is_chosen(work.request_id, self._limits.fraction):
            return
        if asked is not None:
            self._begin(asked, work)
        elif work.request_id not in self._seen:
            for name in names:
                _keep(self._accepted, name, work)

    def _hear_cancel(self, raw: RawMessage) -> None:
        """The client's wish counts on both sides; how far each had come is for the comparison."""
        mirrored = self._open.get(raw_of(raw.subject.rpartition(".")[2]))
        if mirrored is None:
            return
        if mirrored.live.cancelled_at is None:
            mirrored.live.cancelled_at = mirrored.live.num_tokens
        mirrored.cancelled.set()

    def _begin(self, asked: Ask, work: WorkItem) -> None:
        """Mirror a request once, if there is room."""
        name = work.request_id
        self._accepted.pop(name, None)
        if name in self._seen:
            return
        _keep(self._seen, name, None, MAX_SEEN)
        if len(self._open) >= self._limits.max_open:
            self.agreement.drop("behind")
            return
        now_s = time.time()
        live = Outcome(name, asked=asked, asked_s=now_s, work=work)
        request = self._request(live)
        if request is None:
            self.agreement.drop("unreadable")
            return
        self._open[name] = _Mirrored(live, Outcome(name, asked_s=now_s))
        task = asyncio.get_running_loop().create_task(self._mirror(self._open[name], request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _request(self, live: Outcome) -> GenerateRequest | None:
        body = {**live.asked, "request_id": live.request_id, "deliver": "log", **seed_of(live)}
        if self._limits.model is not None or live.work is not None:
            body["model"] = self._limits.model or (live.work.model if live.work is not None else None)
        try:
            return GenerateRequest.model_validate_json(orjson.dumps(body))
        except ValidationError:
            return None

    # ---- both sides of one request

    async def _mirror(self, mirrored: _Mirrored, request: GenerateRequest) -> None:
        try:
            async with asyncio.timeout(self._limits.limit_s), asyncio.TaskGroup() as sides:
                sides.create_task(self._follow(mirrored.live))
                sides.create_task(self._ask(mirrored, request))
            self._compared(self.agreement.take(mirrored.live, mirrored.other), mirrored.live, mirrored.other)
        except TimeoutError:
            self.agreement.drop("too slow")
        except ExceptionGroup as group:
            log.warning("a request was not compared: %s", group.exceptions[0])
            self.agreement.drop("unavailable")
        finally:
            self._open.pop(request.request_id or "", None)

    async def _follow(self, live: Outcome) -> None:
        """Read the live output, from its log where it was ahead of us."""
        generation = Generation(self._live, live.request_id)
        subject = self._live.subjects.live(live.request_id)
        subscription = await self._live.transport.subscribe(subject, generation.receive)
        try:
            await _collect(generation, live)
        finally:
            with contextlib.suppress(NatterjackError):
                await subscription.close()

    async def _ask(self, mirrored: _Mirrored, request: GenerateRequest) -> None:
        other = mirrored.other
        try:
            async with (
                generate(self._other, request, accept_timeout_s=ACCEPT_TIMEOUT_S) as generation,
                _once(mirrored.cancelled, generation.cancel),
            ):
                await _collect(generation, other)
        except NatterjackError as error:
            other.refuse(error.body(), time.time())


async def _collect(generation: Generation, outcome: Outcome) -> None:
    async for chunk in generation:
        outcome.add_chunk(chunk, time.time())


@contextlib.asynccontextmanager
async def _once(event: asyncio.Event, act: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Do something when the event comes, while the block runs."""

    async def wait() -> None:
        await event.wait()
        await act()

    task = asyncio.create_task(wait())
    try:
        yield
    finally:
        task.cancel()


def _keep(memory: "OrderedDict[str, Any]", name: str, value: Any, limit: int = MAX_HELD) -> None:
    memory[name] = value
    if len(memory) > limit:
        memory.popitem(last=False)
