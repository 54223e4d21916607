"""Shares of an executor's time are of the time in which answers were under way, and of nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.record import RequestRecord
from services.bench.step_times import StepTime, busy_spans, executor_figures, merged, overlap_s

span = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(pair[0] + pair[1])))


@given(st.lists(span, max_size=12), span)
def test_overlaps_with_a_union_are_those_counted_second_by_second(spans, one):
    union = merged(spans)
    covered = {second for begin, end in spans for second in range(int(begin), int(end))}
    assert sum(end - begin for begin, end in union) == len(covered)
    assert overlap_s(one, union) == len(covered & set(range(int(one[0]), int(one[1]))))


def test_waiting_while_nothing_is_asked_is_no_idle_time():
    steps = [StepTime(10.0, 1.0, 9.0), StepTime(11.5, 1.0, 0.5), StepTime(100.0, 1.0, 87.5)]
    figures = executor_figures(steps, [(10.0, 11.5)])
    assert (figures.busy_s, figures.num_steps) == (1.5, 3)
    assert figures.idle_share == pytest.approx(0.5 / 1.5)
    assert figures.engine_share == pytest.approx(1.0 / 1.5)


def test_no_answers_and_no_steps_give_zeros():
    figures = executor_figures([], [])
    assert (figures.idle_share, figures.engine_share, figures.median_step_ms) == (0.0, 0.0, 0.0)


def test_answers_under_way_are_between_first_and_last_piece_and_merge():
    records = [
        RequestRecord(pieces_s=[1.0, 3.0]),
        RequestRecord(pieces_s=[2.0, 4.0]),
        RequestRecord(pieces_s=[6.0, 7.0]),
        RequestRecord(),
    ]
    assert busy_spans(records) == [(1.0, 4.0), (6.0, 7.0)]
