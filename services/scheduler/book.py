"""Every request that this scheduler holds, from the queue's delivery to the acknowledgement. Pure: time is a parameter.

Owns which sequences wait and in which order, which ids were cancelled before they came, and which executor a waiting
sequence goes to. What is decided costs what waits, not what is held: finished and running requests are not looked at.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter

from schemas.errors import Cancelled, ContextLengthExceeded, DeadlineExceeded, NatterjackError
from schemas.generation import PRIORITIES, Priority
from services.scheduler.executor_state import ExecutorState
from services.scheduler.planner import Limits, Rank, rank_of
from services.scheduler.requests import Request, Sequence

CANCELLED_MEMORY_S = 60.0
SHARE_OF_EACH_CLASS = 8
"""One in so many of the waiting places is every priority class's own, so that its oldest requests can age here."""


class RequestBook:
    """Requests by id, and their waiting sequences by rank."""

    def __init__(self, ageing_s: float = 0.0) -> None:
        self.requests: dict[str, Request] = {}
        self._ageing_s = ageing_s
        self._waiting: list[tuple[Rank, Sequence]] = []
        self._cancelled: dict[str, float] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self.requests.values()))

    def get(self, request_id: str) -> Request | None:
        """Return a request that is held."""
        return self.requests.get(request_id)

    def add(self, request: Request, now_s: float) -> NatterjackError | None:
        """Hold a request; returns why it must end at once, if it must."""
        self.requests[request.work.request_id] = request
        self.wait(request.sequences)
        if self._cancelled.pop(request.work.request_id, 0.0) > now_s:
            return Cancelled("The request was cancelled before it began.")
        return expired(request, now_s)

    def wait(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences wait for an executor: new ones, and those that an executor gave back."""
        for sequence in sequences:
            if self._may_wait(sequence):
                insort(self._waiting, (rank_of(sequence, self._ageing_s), sequence), key=itemgetter(0))

    def remember_cancelled(self, request_id: str, now_s: float) -> None:
        """Note a cancellation of a request that has not come yet."""
        self._cancelled = {key: until for key, until in self._cancelled.items() if until > now_s}
        self._cancelled[request_id] = now_s + CANCELLED_MEMORY_S

    def remove(self, request: Request) -> None:
        """Let go of a request."""
        self.requests.pop(request.work.request_id, None)

    def _may_wait(self, sequence: Sequence) -> bool:
        request = sequence.request
        is_held = self.requests.get(request.work.request_id) is request
        return is_held and sequence.status == "waiting" and request.error is None

    def waiting(self) -> list[Sequence]:
        """Return the sequences that wait for an executor, in their order."""
        self._waiting = [item for item in self._waiting if self._may_wait(item[1])]
        return [sequence for _, sequence in self._waiting]

    @property
    def num_waiting(self) -> int:
        """Requests with a sequence that waits."""
        return len({sequence.request.work.request_id for sequence in self.waiting()})

    @property
    def num_running(self) -> int:
        """Requests with a sequence on an executor."""
        return sum(any(s.status in ("running", "acquiring") for s in r.sequences) for r in self.requests.values())

    def room_for(self, priority: Priority, max_waiting: int) -> int:
        """Return how many more requests of a class may be taken from the queue.

        Only those of the class itself and of higher ones stand in its way: what waits in the queue is never better than
        what waits here. A few places are each class's own.
        """
        waiting = {sequence.request.work.request_id: sequence.request.work.priority for sequence in self.waiting()}
        level = PRIORITIES.index(priority)
        num_before = sum(PRIORITIES.index(other) <= level for other in waiting.values())
        num_own = sum(other == priority for other in waiting.values())
        return max(max_waiting - num_before, -(-max_waiting // SHARE_OF_EACH_CLASS) - num_own, 0)

    def assign(
        self,
        states: Iterable[ExecutorState],
        limits: Limits,
        refuse: Callable[[Request, NatterjackError], None],
        *,
        may_begin: bool = True,
    ) -> list[ExecutorState]:
        """Give waiting sequences, first by rank, to the executors where the least is left to compute, load included.

        Without `may_begin`, only those of requests that have run before. Returns the executors that were given some.
        """
        if not self._waiting or not (candidates := list(states)):
            return []
        open_ones = [state for state in candidates if state.may_admit]
        room = _room(open_ones, len(self._waiting), limits)
        kept: list[tuple[Rank, Sequence]] = []
        given: dict[str, ExecutorState] = {}
        num_seen = 0
        for item in self._waiting:
            if room <= 0 or not open_ones:
                break
            num_seen += 1
            sequence = item[1]
            if not self._may_wait(sequence):
                continue
            if not (may_begin or sequence.request.has_begun):
                kept.append(item)
                continue
            room -= 1
            if (best := _place(sequence, open_ones)) is not None:
                best.admit(sequence)
                given[best.executor] = best
                if not best.may_admit:
                    open_ones.remove(best)
            elif all(state.max_len < sequence.max_len for state in candidates):
                refuse(sequence.request, _too_long(sequence, candidates))
            else:
                kept.append(item)
        self._waiting[:num_seen] = kept
        return list(given.values())


def _place(sequence: Sequence, states: list[ExecutorState]) -> ExecutorState | None:
    """Return where a sequence goes; None when it has to wait, also for a prefix that is being computed there."""
    able = [state for state in states if state.max_len >= sequence.max_len]
    if not able or (best := cheapest(sequence, able)).is_computing_prefix_of(sequence):
        return None
    return best


def _room(states: list[ExecutorState], num_waiting: int, limits: Limits) -> int:
    """Return how many of the waiting sequences are worth a look; every open executor takes one at least."""
    if num_waiting <= len(states):
        return num_waiting
    return sum(limits.max_num_seqs - state.num_active for state in states)


def cheapest(sequence: Sequence, states: list[ExecutorState]) -> ExecutorState:
    """Return where a sequence costs least: what is left to compute of it and of the prompts before it, and the load.

    Most executors cost one comparison: only one that would be the best if it had all of the prompt is looked at, and
    closely only if it has the block that would make it so.
    """
    if len(states) == 1:
        return states[0]
    best = min(states, key=attrgetter("load"))
    least = best.load + best.num_to_compute(sequence)
    num_tokens = len(sequence.tokens)
    naming, keys = best.naming, sequence.prefix_keys(best.naming)
    num_shareable = len(keys) * naming.block_size
    for state in states:
        if state.naming is not naming:
            naming, keys = state.naming, sequence.prefix_keys(state.naming)
            num_shareable = len(keys) * naming.block_size
        num_missing = state.load + num_tokens - least
        if num_missing >= num_shareable:
            continue
        if keys[num_missing // naming.block_size] in state.known.held:
            cost = state.load + state.num_to_compute(sequence)
            best, least = (state, cost) if cost < least else (best, least)
    return best


def _too_long(sequence: Sequence, states: list[ExecutorState]) -> NatterjackError:
    limit = max(state.max_len for state in states)
    return ContextLengthExceeded(
        f"The request needs room for {sequence.max_len} tokens, but the largest executor takes {limit}. "
        "Ask for fewer tokens, or give the executor more memory (executor.kv_cache_bytes).",
        max_tokens=limit,
        requested_tokens=sequence.max_len,
    )


def expired(request: Request, now_s: float) -> NatterjackError | None:
    """Return the error of a request whose deadline has passed."""
    deadline_s = request.work.deadline_s
    if deadline_s is None or now_s < deadline_s:
        return None
    return DeadlineExceeded("The request's deadline passed before it was finished.")
