"""Which requests are held, in what order they go, and which end before they begin."""

from schemas.errors import Cancelled, ContextLengthExceeded, DeadlineExceeded, NatterjackError
from schemas.generation import PRIORITIES
from services.scheduler.book import CANCELLED_MEMORY_S, RequestBook, expired
from services.scheduler.executor_state import ExecutorState
from services.scheduler.planner import Limits
from services.scheduler.requests import Request
from tests.unit.scheduler.scheduling_traffic import capacity, request

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=64, lookahead_tokens=8)


def state(name: str = "executor-0", *, num_blocks: int = 64, max_model_len: int = 10_000) -> ExecutorState:
    return ExecutorState(
        executor=name,
        incarnation="life-1",
        epoch=1,
        capacity=capacity(num_blocks, max_model_len=max_model_len),
        limits=LIMITS,
        depth=2,
    )


def book_of(*requests: Request) -> RequestBook:
    book = RequestBook()
    for item in requests:
        assert book.add(item, 0.0) is None
    return book


def assign(book: RequestBook, *states: ExecutorState) -> list[tuple[Request, NatterjackError]]:
    refused: list[tuple[Request, NatterjackError]] = []
    book.assign(states, LIMITS, lambda item, error: refused.append((item, error)))
    return refused


def test_higher_rank_is_assigned_first() -> None:
    items = [
        request("a", created_s=1.0, cache_salt="a"),
        request("b", created_s=2.0, cache_salt="b"),
        request("c", created_s=3.0, cache_salt="c", priority="high"),
    ]
    book, executor = book_of(*items), state()
    assign(book, executor)
    assert [executor.holds(item.sequences[0]) for item in items] == [True, False, True]
    assert (book.num_waiting, book.num_running) == (1, 2)


def test_executor_with_the_least_to_do_is_chosen() -> None:
    first, second = state("executor-0"), state("executor-1")
    book = book_of(*(request(name, cache_salt=name) for name in "abc"))
    assign(book, first, second)
    assert (first.num_active, second.num_active) == (2, 1)


def test_a_prefix_that_is_being_computed_is_waited_for_where_it_is() -> None:
    first, second = state("executor-0"), state("executor-1")
    items = [request(name, prompt_len=9) for name in "abc"]
    book = book_of(*items)
    assign(book, first)
    assert (first.num_active, book.num_waiting) == (1, 2)
    first.remove(items[0].sequences[0])
    assign(book, first)
    assert first.holds(items[1].sequences[0])
    assign(book, first, second)
    assert second.num_active == 1, "an idle executor that knows as little is better than waiting"


def test_nothing_is_assigned_or_refused_without_an_executor() -> None:
    book = book_of(request("a"))
    assert assign(book) == []
    assert book.num_waiting == 1


def test_too_long_for_every_executor_is_refused_with_both_numbers() -> None:
    long = request("long", prompt_len=20, max_tokens=20)
    book = book_of(long)
    [(refused, error)] = assign(book, state(num_blocks=4), state("executor-1", max_model_len=30))
    assert refused is long
    assert isinstance(error, ContextLengthExceeded)
    assert error.details == {"max_tokens": 30, "requested_tokens": 40}


def test_long_request_goes_where_it_fits() -> None:
    small, large = state("executor-0", num_blocks=4), state("executor-1")
    assert assign(book_of(request("long", prompt_len=20, max_tokens=20)), small, large) == []
    assert (small.num_active, large.num_active) == (0, 1)


def test_cancel_before_arrival_is_remembered_for_a_while() -> None:
    book = RequestBook()
    book.remember_cancelled("a", 0.0)
    book.remember_cancelled("b", 0.0)
    assert isinstance(book.add(request("a"), 1.0), Cancelled)
    assert book.add(request("b"), CANCELLED_MEMORY_S + 1) is None
    book.remember_cancelled("c", CANCELLED_MEMORY_S + 2)
    assert set(book._cancelled) == {"c"}


def test_deadline() -> None:
    assert expired(request("a"), 1e12) is None
    late = request("b", deadline_s=10.0)
    assert expired(late, 9.9) is None
    assert isinstance(expired(late, 10.0), DeadlineExceeded)
    assert isinstance(RequestBook().add(late, 11.0), DeadlineExceeded)


def test_failed_requests_no_longer_wait() -> None:
    failed = request("a")
    book = book_of(failed)
    failed.error = Cancelled("x")
    assert book.waiting() == []


def test_requests_are_found_until_they_are_removed() -> None:
    item = request("a")
    book = book_of(item)
    assert book.get("a") is item
    assert list(book) == [item]
    book.remove(item)
    book.remove(item)
    assert book.get("a") is None


def test_what_is_given_back_waits_in_its_old_place() -> None:
    items = [
        request(name, created_s=created, cache_salt=name) for name, created in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    ]
    book, executor = book_of(*items), state()
    assign(book, executor)
    book.wait(executor.abandon())
    assert [sequence.request.work.request_id for sequence in book.waiting()] == ["a", "b", "c"]


def test_what_ended_meanwhile_does_not_wait_again() -> None:
    ended, gone = request("ended"), request("gone")
    book, executor = book_of(ended, gone), state()
    assign(book, executor)
    ended.sequences[0].status = "finished"
    book.remove(gone)
    book.wait([ended.sequences[0], gone.sequences[0]])
    assert book.waiting() == []


def test_a_class_takes_from_the_queue_what_nothing_better_waits_before() -> None:
    book = book_of(*(request(f"low-{number}", priority="low") for number in range(16)))
    assert [book.room_for(priority, 16) for priority in PRIORITIES] == [16, 16, 0]
    book = book_of(*(request(f"high-{number}", priority="high") for number in range(16)))
    assert [book.room_for(priority, 16) for priority in PRIORITIES] == [0, 2, 2], (
        "the oldest of each class can age here"
    )


def test_a_request_that_skips_the_cache_reads_nothing_but_leaves_what_it_computed() -> None:
    executor = state()
    executor.known.remember(request("first", prompt_len=9).sequences[0].prefix_keys(executor.naming))
    plain, skipping = request("b", prompt_len=9), request("c", prompt_len=9, skip_reading_prefix_cache=True)
    assert executor.num_to_compute(plain.sequences[0]) == 1
    assert executor.num_to_compute(skipping.sequences[0]) == 9
    assert skipping.sequences[0].name_blocks(executor.naming) == plain.sequences[0].name_blocks(executor.naming)
