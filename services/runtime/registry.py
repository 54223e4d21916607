"""Who is alive: every instance beats into one bucket, and everyone who needs to know keeps a view of it.

The view reads the bucket once, then follows it by a core subscription (no consumer to lose), and reads it again after a
reconnection. It trusts no entry by itself: whoever has not beaten lately is not healthy, whatever its entry says.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from schemas.control import Registration, Role
from schemas.errors import NatterjackError, Unavailable
from schemas.subjects import subject_token
from services.runtime.bus import Bus
from services.runtime.transport import NoStream, Subscription

log = logging.getLogger(__name__)

MIN_BEATS = 2
"""An instance is unhealthy after the silence that it names itself, but never before so many beats are missing."""
SILENCES_TO_VANISH = 3
"""Its entry vanishes after so many times of that."""
ANNOUNCE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One instance as this process sees it."""

    registration: Registration
    age_s: float

    @property
    def is_fresh(self) -> bool:
        """Tell whether it has beaten lately."""
        return self.age_s <= _silence_s(self.registration)

    @property
    def is_healthy(self) -> bool:
        """Tell whether it is ready for work and has beaten lately."""
        return self.is_fresh and self.registration.state == "ready"


class Registry:
    """A live view of the registry bucket; use it as an async context manager."""

    def __init__(self, bus: Bus, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._seen: dict[str, tuple[Registration, float]] = {}
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[Registration | None, str], None]] = []
        self._subscription: Subscription | None = None
        self._reload: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Registry":
        self._subscription = await self._bus.kv_listen(
            self._bus.subjects.registry, Registration, self._put, self._deleted
        )
        await self._read_all()
        self._bus.transport.on_reconnect(self._on_reconnect)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._reload is not None:
            self._reload.cancel()
        if self._subscription is not None:
            await self._subscription.close()

    def listen(self, callback: Callable[[Registration | None, str], None]) -> None:
        """Call `callback(registration, instance)` at every beat, and with None when an instance leaves."""
        self._listeners.append(callback)

    async def _read_all(self) -> None:
        """Entries of the bucket are of unknown age, at most the time-to-live: they count as fresh once."""
        try:
            entries = await self._bus.kv_entries(self._bus.subjects.registry, Registration)
        except NoStream:  # nobody has started yet; the subscription will tell of the first one
            return
        for stored in entries:
            if stored.message.instance not in self._seen:
                self._put(stored.message.instance, stored.message)

    def _on_reconnect(self) -> None:
        self._reload = asyncio.get_running_loop().create_task(self._read_again())

    async def _read_again(self) -> None:
        try:
            await self._read_all()
        except NatterjackError as error:
            log.warning("the registry could not be read again: %s", error.message)

    def _put(self, key: str, registration: Registration) -> None:
        self._seen[registration.instance] = (registration, self._clock())
        self._tell(registration, registration.instance)

    def _deleted(self, key: str) -> None:
        for instance in [name for name in self._seen if subject_token(name) == key]:
            del self._seen[instance]
            self._tell(None, instance)

    def _tell(self, registration: Registration | None, instance: str) -> None:
        self._changed.set()
        for listener in self._listeners:
            listener(registration, instance)

    def entries(self) -> list[Entry]:
        """Return every instance seen and not yet vanished, by name."""
        now = self._clock()
        for name, (registration, seen_at) in list(self._seen.items()):
            if now - seen_at > _life_s(registration):
                del self._seen[name]
        return [Entry(registration, now - seen_at) for _, (registration, seen_at) in sorted(self._seen.items())]

    def healthy(self, role: Role) -> list[Registration]:
        """Return the instances of a role that are ready and have beaten lately."""
        return [e.registration for e in self.entries() if e.registration.role == role and e.is_healthy]

    def models(self) -> set[str]:
        """Return the names of the models that any instance of this deployment is for."""
        return {entry.registration.model for entry in self.entries()}

    def missing(self, roles: Iterable[Role]) -> list[Role]:
        """Return the roles that have no healthy instance."""
        present = {entry.registration.role for entry in self.entries() if entry.is_healthy}
        return [role for role in roles if role not in present]

    async def wait_ready(self, roles: Iterable[Role], timeout_s: float) -> None:
        """Wait until every role has a healthy instance; raises Unavailable naming those that have none."""
        wanted = tuple(roles)
        deadline = self._clock() + timeout_s
        while missing := self.missing(wanted):
            remaining = deadline - self._clock()
            if remaining <= 0:
                raise Unavailable(f"Not ready within {timeout_s:g} s: {', '.join(missing)}.")
            self._changed.clear()
            try:
                async with asyncio.timeout(min(remaining, 0.5)):
                    await self._changed.wait()
            except TimeoutError:
                continue


class Heartbeat:
    """Publishes one instance's registration at once when it changes, and again every period."""

    def __init__(self, bus: Bus, registration: Registration) -> None:
        self._bus = bus
        self._registration = registration
        self._load: Callable[[], dict[str, float]] = dict
        self._dirty = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def registration(self) -> Registration:
        """What is published."""
        return self._registration

    def start(self) -> None:
        """Begin to beat."""
        self._task = asyncio.create_task(self._beat(), name="heartbeat")

    def measure_load(self, load: Callable[[], dict[str, float]]) -> None:
        """Publish `load()` with every beat: gauges computed from state."""
        self._load = load

    def update(self, **changes: object) -> None:
        """Change fields of the registration and publish soon."""
        self._registration = self._registration.model_copy(update=changes)
        self._dirty.set()

    async def announce(self, **changes: object) -> None:
        """Change fields and publish them before going on, unless the bus is away."""
        self.update(**changes)
        try:
            async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
                await self._publish()
        except TimeoutError:
            log.warning("the registry was not told of %s", changes)

    async def _beat(self) -> None:
        while True:
            self._dirty.clear()
            await self._publish()
            try:
                async with asyncio.timeout(self._registration.heartbeat_s):
                    await self._dirty.wait()
            except TimeoutError:
                continue

    async def _publish(self) -> None:
        entry = self._registration.model_copy(update={"load": self._measured()})
        key, ttl_s = subject_token(entry.instance), _life_s(entry)
        try:
            await self._bus.kv_put(self._bus.subjects.registry, key, entry, ttl_s=ttl_s)
        except NatterjackError as error:
            log.warning("heartbeat failed: %s", error.message)

    def _measured(self) -> dict[str, float]:
        try:
            return self._load()
        except Exception:  # a bug in a gauge must not make a working instance look dead
            log.exception("the load could not be measured")
            return {}

    async def leave(self) -> None:
        """Stop beating and take the entry away, so that nobody waits for its expiry."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        try:
            await self._bus.kv_delete(self._bus.subjects.registry, subject_token(self._registration.instance))
        except NatterjackError as error:
            log.warning("could not leave the registry: %s", error.message)


def _silence_s(registration: Registration) -> float:
    return max(registration.silent_after_s, MIN_BEATS * registration.heartbeat_s)


def _life_s(registration: Registration) -> float:
    return _silence_s(registration) * SILENCES_TO_VANISH
