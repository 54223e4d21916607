"""Requests as their client sees them: what is counted at which end, and that nothing stays open."""

import pytest

from schemas.errors import Cancelled, InternalError, NatterjackError
from schemas.output import ChoiceDelta, OutputChunk
from services.runtime.metrics import Metrics
from services.runtime.metrics_page import metrics_page
from services.runtime.request_meter import RequestMeter


def chunk(num_tokens: int, *, end: str | None = None, error: NatterjackError | None = None) -> OutputChunk:
    return OutputChunk.model_validate(
        {
            "request_id": "r",
            "model": "smol",
            "created_s": 0.0,
            "epoch": 1,
            "choices": (ChoiceDelta(token_ids=tuple(range(num_tokens)), finish_reason=end),),
            "final": end is not None or error is not None,
            "error": error.body() if error is not None else None,
        }
    )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("smol")


@pytest.fixture
def meter(metrics: Metrics) -> RequestMeter:
    return RequestMeter(metrics)


def ends(metrics: Metrics) -> dict[str, float]:
    reasons = ("stop", "length", "abort", "error")
    counted = {reason: metrics.counter("request_success_total", reason).value for reason in reasons}
    return {reason: value for reason, value in counted.items() if value}


def test_a_request_from_its_arrival_to_its_last_token(metrics: Metrics, meter: RequestMeter):
    times = meter.begin(100.0)
    assert b"num_requests_open" in metrics_page(metrics)[0]
    times.accepted(7)
    for now_s, piece in ((100.5, chunk(1)), (100.6, chunk(2)), (100.8, chunk(1, end="stop"))):
        times.chunk(piece, now_s)
    times.close()
    assert ends(metrics) == {"stop": 1}
    assert (meter.prompt_tokens.value, meter.generation_tokens.value) == (7, 4)
    assert meter.first_token.total == pytest.approx(0.5)
    assert meter.whole.total == pytest.approx(0.8)
    assert (sum(meter.between_tokens.counts), meter.between_tokens.total) == (3, pytest.approx(0.3))
    assert meter.per_output_token.total == pytest.approx(0.1)
    assert meter.open == set()


def test_one_choice_that_was_cut_makes_the_request_one_that_was_cut(metrics: Metrics, meter: RequestMeter):
    times = meter.begin(0.0)
    times.accepted(1)
    first = chunk(3, end="length").model_copy(update={"final": False})
    times.chunk(first, 1.0)
    times.chunk(chunk(2, end="stop"), 2.0)
    assert ends(metrics) == {"length": 1}


def test_a_refused_request_is_an_error_and_no_end(metrics: Metrics, meter: RequestMeter):
    times = meter.begin(0.0)
    times.failed("queue_full")
    times.close()
    assert ends(metrics) == {}
    assert metrics.counter("request_errors_total", "queue_full").value == 1


@pytest.mark.parametrize(("error", "end"), [(InternalError("bug"), "error"), (Cancelled("gone"), "abort")])
def test_an_error_after_acceptance_is_counted_once(
    metrics: Metrics, meter: RequestMeter, error: NatterjackError, end: str
):
    times = meter.begin(0.0)
    times.accepted(1)
    times.chunk(chunk(0, error=error), 1.0)
    times.failed(error.code)  # the error chunk is raised to whoever reads, who tells again
    times.close()
    assert ends(metrics) == {end: 1}
    assert metrics.counter("request_errors_total", error.code).value == 1


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_client_that_leaves_is_an_abort(metrics: Metrics, meter: RequestMeter, is_accepted: bool):
    times = meter.begin(0.0)
    if is_accepted:
        times.accepted(1)
    times.close()
    times.close()
    assert ends(metrics) == {"abort": 1}
    assert meter.open == set()


def test_a_request_that_goes_on_elsewhere_has_no_end_here(metrics: Metrics, meter: RequestMeter):
    times = meter.begin(0.0)
    times.accepted(1)
    times.leave()
    times.close()
    assert ends(metrics) == {}
