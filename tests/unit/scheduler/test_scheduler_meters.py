"""What the scheduler counts: refused and preempted sequences apart, times of each part, epochs, aborts."""

import pytest

from services.runtime.metrics import Metrics
from services.runtime.metrics_page import metrics_page
from services.scheduler.book import RequestBook
from services.scheduler.executor_state import Progress
from services.scheduler.meters import SchedulerMeters
from services.scheduler.requests import Sequence
from tests.unit.scheduler.scheduling_traffic import request, sequence


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("smol")


@pytest.fixture
def meters(metrics: Metrics) -> SchedulerMeters:
    return SchedulerMeters(metrics, RequestBook(), {})


def token(one: Sequence, *, last: bool = False) -> list[Progress]:
    return [Progress(one, 5, None, "length" if last else None, False)]


def test_only_a_sequence_that_ran_is_preempted(metrics: Metrics, meters: SchedulerMeters):
    one = sequence()
    meters.returned([one], False)  # refused: it never had blocks
    assert metrics.counter("num_preemptions_total").value == 0
    meters.admitted([one], 1.0)
    meters.returned([one], False)
    meters.returned([one], False)  # refused again
    assert metrics.counter("num_preemptions_total").value == 1
    meters.admitted([one], 2.0)
    meters.returned([one], True)
    assert metrics.counter("num_preemptions_total").value == 1
    assert metrics.counter("executor_restarts_total").value == 1


def test_a_sequence_queues_and_prefills_once_however_often_it_is_preempted(metrics: Metrics, meters: SchedulerMeters):
    one = sequence()
    meters.admitted([one], 3.0)
    meters.progressed(token(one), 3.5)
    meters.returned([one], False)
    meters.admitted([one], 9.0)
    meters.progressed(token(one), 9.5)
    meters.progressed(token(one, last=True), 10.0)
    for name, seconds in {
        "request_queue_time_seconds": 3.0,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 6.5,
    }.items():
        histogram = metrics.histogram(name)
        assert (sum(histogram.counts), histogram.total) == (1, pytest.approx(seconds)), name


def test_an_abort_is_timed_to_its_stored_end(metrics: Metrics, meters: SchedulerMeters):
    cancelled, other = request("a"), request("b")
    meters.cancelled(cancelled)
    for one in (cancelled, other):
        meters.stored(one)
        meters.let_go(one)
    meters.stored(cancelled)
    assert sum(metrics.histogram("time_to_abort_seconds").counts) == 1


def test_only_a_repeated_delivery_is_a_redelivery(metrics: Metrics, meters: SchedulerMeters):
    for number in (1, 2, 3):
        meters.delivered(number)
    assert metrics.counter("redeliveries_total").value == 2


def test_the_gauges_are_those_of_the_book(metrics: Metrics):
    book = RequestBook()
    SchedulerMeters(metrics, book, {})
    book.add(request("a"), 0.0)
    assert b'natterjack_num_requests_waiting{model_name="smol"} 1' in metrics_page(metrics)[0]
    book.remove(book.requests["a"])
    page = metrics_page(metrics)[0]
    assert b'natterjack_num_requests_waiting{model_name="smol"} 0' in page
    assert b'natterjack_oldest_request_age_seconds{model_name="smol"} 0' in page
