"""A request is good when it succeeded and met every objective."""

import pytest

from services.bench.goodput import Objective, count_good, parse_objectives
from services.bench.record import RequestRecord


def record(ttft_s=0.1, latency_s=1.0, num_tokens=10, error=""):
    return RequestRecord(0.0, 5.0, 5.0 + latency_s, [5.0 + ttft_s, 5.0 + latency_s], 3, 0, num_tokens, error)


def test_objectives_are_read_from_one_or_several_texts():
    wanted = (Objective("ttft", 100.0), Objective("tpot", 12.5))
    assert parse_objectives(["ttft:100 tpot:12.5"]) == parse_objectives(["ttft:100", "tpot:12.5"]) == wanted


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:x", "ttft:-1", "ttft:nan", ":5"])
def test_what_is_no_objective_is_refused_with_how_to_write_one(text):
    with pytest.raises(ValueError, match="ttft:100"):
        parse_objectives([text])


@pytest.mark.parametrize(
    ("objectives", "is_good"),
    [
        (["ttft:101"], True),
        (["ttft:99"], False),
        (["tpot:100.1"], True),
        (["tpot:99.9"], False),
        (["e2el:1001"], True),
        (["e2el:999"], False),
        (["ttft:101", "e2el:999"], False),
    ],
)
def test_every_objective_must_be_met(objectives, is_good):
    assert count_good([record()], parse_objectives(objectives)) == is_good


def test_a_failed_request_is_never_good_and_one_token_needs_no_time_per_token():
    objectives = parse_objectives(["tpot:0"])
    assert count_good([record(error="gone"), record(num_tokens=1)], objectives) == 1
