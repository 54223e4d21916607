"""Sequences whose embedding is wanted: rows that bring hidden states, and an end with a vector instead of a token."""

import base64
from typing import Any

import numpy as np
import pytest

from engine_core.batch import NO_TOKEN, Row
from schemas.sampling import Pooling, SamplingParams
from schemas.step import NewSequence, Run, StepPlan, StepResult
from services.executor.engine_thread import _run
from services.executor.sequences import Sequences

SIZE = 4


def new(kind: str = "mean", dimensions: int | None = None, **changes: Any) -> NewSequence:
    values: dict[str, Any] = {
        "sequence": 1,
        "request_id": "r",
        "token_ids": (1, 2, 3, 4, 5),
        "prompt_len": 5,
        "max_len": 6,
        "blocks": (0,),
        "sampling": SamplingParams(pooling=Pooling(kind=kind, dimensions=dimensions)),
    }
    return NewSequence.model_validate(values | changes)


def plan(step: int, num_tokens: int, *added: NewSequence) -> StepPlan:
    return StepPlan(scheduler="s", epoch=1, step=step, new=added, run=(Run(sequence=1, num_tokens=num_tokens),))


def state(token: int) -> list[float]:
    return [token, token * token, 1, -token]


def answer(row: Row) -> np.ndarray | None:
    tokens = {"all": row.tokens, "last": row.tokens[-1:], None: ()}[row.hidden]
    return np.array([state(token) for token in tokens], dtype=np.float32) if tokens else None


def run(sequences: Sequences, message: StepPlan) -> tuple[list[Row], StepResult]:
    rows = sequences.begin(message, 1.0)
    assert rows is not None
    return rows, sequences.finish(message, [answer(row) for row in rows], 2.0)


def vector_of(result: StepResult) -> np.ndarray:
    [sampled] = result.sampled
    assert (sampled.token, sampled.position, sampled.finish_reason) == (NO_TOKEN, 5, "stop")
    return np.frombuffer(base64.b64decode(sampled.embedding), dtype="<f4")


def normalised(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float64) / np.linalg.norm(values)


def test_the_mean_gathers_every_chunk_and_ends_with_the_vector() -> None:
    sequences = Sequences()
    [row], result = run(sequences, plan(1, 3, new()))
    assert (row.tokens, row.hidden, row.sampling) == ((1, 2, 3), "all", None)
    assert result.sampled == ()
    [row], result = run(sequences, plan(2, 2))
    assert (row.tokens, row.hidden) == ((4, 5), "all")
    assert vector_of(result) == pytest.approx(normalised(np.mean([state(t) for t in range(1, 6)], axis=0)), abs=1e-6)
    assert sequences.running == {}
    assert [ended.num_generated for ended in sequences.take_ended()] == [0]


def test_the_last_needs_nothing_of_earlier_chunks_and_takes_what_is_cached() -> None:
    sequences = Sequences()
    [row], result = run(sequences, plan(1, 1, new("last", num_computed=2)))
    assert (row.tokens, row.hidden, result.sampled) == ((3,), None, ())
    [row], result = run(sequences, plan(2, 2))
    assert (row.tokens, row.hidden) == ((4, 5), "last")
    assert vector_of(result) == pytest.approx(normalised(state(5)), abs=1e-6)


def test_dimensions_cut_before_normalising() -> None:
    _, result = run(Sequences(), plan(1, 5, new("last", dimensions=2)))
    assert vector_of(result) == pytest.approx(normalised([5, 25]), abs=1e-6)


def test_a_mean_without_all_its_positions_is_an_error() -> None:
    _, result = run(Sequences(), plan(1, 3, new(num_computed=2)))
    assert [(s.finish_reason, s.embedding) for s in result.sampled] == [("error", None)]


class NoHiddenStates:
    """An engine such as echo, where a request for an embedding should not have come."""

    class info:
        embedding_size = 0


def test_an_engine_without_hidden_states_fails_the_sequence_and_nothing_else() -> None:
    sequences = Sequences()
    message = plan(1, 5, new())
    rows = sequences.begin(message, 1.0)
    result = sequences.finish(message, _run(NoHiddenStates(), rows), 2.0)  # type: ignore[arg-type]
    assert [(s.token, s.finish_reason, s.embedding) for s in result.sampled] == [(NO_TOKEN, "error", None)]
