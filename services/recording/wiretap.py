"""Listens to everything that a deployment's parts say to each other. An edge module: core subscriptions, nothing else.

A recorder is one more subscriber: no service knows of it, waits for it or sends anything because of it. The callbacks
only gather messages, which go to the writing thread in batches through a bounded queue; what does not fit is counted.
"""

import asyncio
import contextlib
import queue
import time
from dataclasses import dataclass, replace

from schemas.codec import SCHEMA_HEADER
from schemas.errors import ERROR_HEADER, NatterjackError
from schemas.subjects import Subjects
from services.recording.arrivals import captured_of
from services.recording.capture_file import Captured, Note
from services.recording.filters import Filters
from services.recording.message_kinds import ERROR_SCHEMA, KINDS, LEFT_OUT
from services.runtime.bus import KV_STREAM_PREFIX, KV_SUBJECT_PREFIX, Bus
from services.runtime.transport import NoStream, RawMessage, Subscription

MAX_QUEUED = 50_000
MAX_QUEUED_BYTES = 128 << 20
HAND_OVER_S = 0.05
"""How long messages are gathered: to wake the writing thread for each would cost as much as writing it."""
REPLIES = frozenset({name for name in KINDS if name.endswith("_reply")} | {"accepted"})
LEASE_KINDS = ("scheduler_lease", "handed_back", "pause", "cache_ownership")
INBOXES = ("_INBOX.*", "_INBOX.*.*")
"""Where services answer. The server's own answers, which are most, come to longer subjects."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message and when it came (Unix time)."""

    arrived_s: float
    raw: RawMessage


class Wiretap:
    """The subscriptions, and the queue between the event loop and the writing thread."""

    def __init__(self, bus: Bus, filters: Filters) -> None:
        self.queue: queue.SimpleQueue[list[Heard | Note]] = queue.SimpleQueue()
        self.num_dropped: dict[str, int] = {}
        self.num_taken = self.num_bytes_taken = 0
        self._num_put = self._num_bytes_put = 0
        self._gathered: list[Heard | Note] = []
        self._bus = bus
        self._filters = filters
        self._attempts = bus.subjects.out_all.removesuffix(">")
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Begin to listen; returns when the server knows all subscriptions."""
        for pattern in self._patterns(self._bus.subjects):
            receive = self._receive_reply if pattern in INBOXES else self._receive
            self._subscriptions.append(await self._bus.transport.subscribe(pattern, receive))
        await self._bus.transport.flush()

    def _patterns(self, subjects: Subjects) -> list[str]:
        """Return what to listen to.

        One subscription hears the whole path, for only within one is the order of messages the server's own. If few
        kinds are wanted, and no request has to be recognised by other messages, their subjects alone are asked for.
        """
        buckets = {name: f"{KV_SUBJECT_PREFIX}{bucket}.>" for name, bucket in _buckets(subjects).items()}
        kinds = self._filters.kinds
        if self._filters.requests or not kinds:
            return [subjects.all_of(), *INBOXES, *dict.fromkeys(buckets.values())]
        by_kind = {
            "generate_request": (subjects.all_of("generate"),),
            "accepted": (subjects.all_of("generate"), *INBOXES),
            ERROR_SCHEMA: (subjects.all_of("generate"), subjects.all_of("cache"), *INBOXES),
            "work_item": (subjects.work_all,),
            "cache_command": (subjects.all_of("cache"),),
            "cache_reply": (subjects.all_of("cache"), *INBOXES),
            "step_plan": (subjects.all_of("exec"),),
            "step_result": (subjects.all_of("exec"),),
            "token_batch": (subjects.all_of("detok"),),
            "output_feedback": (subjects.all_of("feedback"),),
            "output_chunk": (subjects.live_all,),
            "cancel": (subjects.all_of("cancel"),),
            **{name: (pattern,) for name, pattern in buckets.items()},
        }
        rest = (subjects.all_of(), *INBOXES)
        return list(dict.fromkeys(pattern for kind in sorted(kinds) for pattern in by_kind.get(kind, rest)))

    async def read_state(self) -> list[Captured]:
        """Return what the buckets hold now: who is there, who holds which executor, with which configuration."""
        state: list[Captured] = []
        for bucket in dict.fromkeys(_buckets(self._bus.subjects).values()):
            with contextlib.suppress(NoStream):
                pattern = f"{KV_SUBJECT_PREFIX}{bucket}.>"
                for found in await self._bus.transport.last_of_each(KV_STREAM_PREFIX + bucket, pattern):
                    raw = RawMessage(found.subject, found.headers, found.body)
                    message = captured_of(time.time(), raw)
                    state += [replace(message, is_stored=True)] if message is not None else []
        return state

    def _receive(self, raw: RawMessage) -> None:
        """Drop attempts to store output, for what was stored comes as live output, and what is not recorded."""
        if not raw.subject.startswith(self._attempts) and _schema_name(raw) not in LEFT_OUT:
            self._put(raw)

    def _receive_reply(self, raw: RawMessage) -> None:
        """Drop the server's own answers, which are most, and output to a reply subject, which is in the log as well."""
        if _schema_name(raw) in REPLIES or ERROR_HEADER in raw.headers:
            self._put(raw)

    def _put(self, raw: RawMessage) -> None:
        size = len(raw.body)
        is_full = self._num_put - self.num_taken >= MAX_QUEUED
        if is_full or self._num_bytes_put - self.num_bytes_taken + size > MAX_QUEUED_BYTES:
            name = _schema_name(raw) or ERROR_SCHEMA
            self.num_dropped[name] = self.num_dropped.get(name, 0) + 1
            return
        self._num_put += 1
        self._num_bytes_put += size
        self._gather(Heard(time.time(), raw))

    def note(self, note: Note) -> None:
        """Put a note behind what was heard so far."""
        self._num_put += 1
        self._gather(note)

    def _gather(self, item: Heard | Note) -> None:
        if not self._gathered:
            asyncio.get_running_loop().call_later(HAND_OVER_S, self.hand_over)
        self._gathered.append(item)

    def hand_over(self) -> None:
        """Let the writing thread have what was gathered."""
        if self._gathered:
            self.queue.put(self._gathered)
            self._gathered = []

    async def close(self) -> None:
        """Stop listening."""
        for subscription in self._subscriptions:
            with contextlib.suppress(NatterjackError):
                await subscription.close()


def _schema_name(raw: RawMessage) -> str:
    return raw.headers.get(SCHEMA_HEADER, "").partition("/")[0]


def _buckets(subjects: Subjects) -> dict[str, str]:
    """Return the bucket of each kind of entry."""
    return {
        "registration": subjects.registry,
        "effective_config": subjects.config,
        **dict.fromkeys(LEASE_KINDS, subjects.leases),
    }
