"""The executor's side of a plan: rows for the engine, ends of its own, and what it refuses to run."""

from typing import Any

import pytest
from llguidance import LLMatcher

from engine_core.batch import NO_TOKEN, NOTHING_ALLOWED, Row, Sampled, Scored, Scoring
from engine_core.grammar import Grammars
from engine_core.token_bytes import read_token_bytes
from schemas.sampling import SamplingParams
from schemas.step import NewSequence, Run, StepPlan, StepResult
from services.executor.sequences import PlanRefused, Sequences


def new(sequence: int = 1, *, prompt_len: int = 5, max_len: int = 20, **changes: Any) -> NewSequence:
    values: dict[str, Any] = {
        "sequence": sequence,
        "request_id": "r",
        "token_ids": tuple(range(1, prompt_len + 1)),
        "prompt_len": prompt_len,
        "max_len": max_len,
        "blocks": (0, 1, 2, 3, 4),
        "sampling": SamplingParams(temperature=0.5, seed=7, num_logprobs=2),
    }
    return NewSequence.model_validate(values | changes)


def plan(step: int, *runs: Run, epoch: int = 1, **changes: Any) -> StepPlan:
    return StepPlan(scheduler="scheduler-0", epoch=epoch, step=step, run=runs, **changes)


def run(sequences: Sequences, message: StepPlan, *tokens: Sampled | int) -> tuple[list[Row], StepResult]:
    rows = sequences.begin(message, 1.0)
    assert rows is not None
    sampled = iter([Sampled(t) if isinstance(t, int) else t for t in tokens])
    return rows, sequences.finish(message, [next(sampled) if row.sampling else None for row in rows], 2.0)


def test_prompt_in_chunks_samples_at_its_end_only() -> None:
    sequences = Sequences()
    [row], result = run(sequences, plan(1, Run(sequence=1, num_tokens=3), new=(new(),)))
    assert (row.tokens, row.start, row.blocks, row.prompt_len, row.sampling) == ((1, 2, 3), 0, (0, 1, 2, 3, 4), 5, None)
    assert result.sampled == ()
    [row], result = run(sequences, plan(2, Run(sequence=1, num_tokens=2)), 9)
    assert (row.tokens, row.start) == ((4, 5), 3)
    assert row.sampling is not None
    assert (row.sampling.position, row.sampling.seed, row.sampling.temperature) == (5, 7, 0.5)
    [sampled] = result.sampled
    assert (sampled.position, sampled.token, sampled.finish_reason) == (5, 9, None)


def test_sequence_feeds_its_own_last_token_and_takes_new_blocks() -> None:
    sequences = Sequences()
    run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(),)), 9)
    [row], _ = run(sequences, plan(2, Run(sequence=1, blocks=(8,))), 10)
    assert (row.tokens, row.start, row.blocks) == ((9,), 5, (0, 1, 2, 3, 4, 8))


def test_cached_tokens_are_not_run_again() -> None:
    [row], _ = run(Sequences(), plan(1, Run(sequence=1), new=(new(num_computed=4),)), 9)
    assert (row.tokens, row.start) == ((5,), 4)


def test_stop_token_ends_the_sequence() -> None:
    sequences = Sequences()
    [_], result = run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(stop_token_ids=(9,)),)), 9)
    assert (result.sampled[0].finish_reason, result.sampled[0].stop_token) == ("stop", True)
    assert sequences.running == {}


def test_length_ends_the_sequence() -> None:
    sequences = Sequences()
    run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(max_len=7),)), 8)
    _, result = run(sequences, plan(2, Run(sequence=1)), 8)
    assert (result.sampled[0].finish_reason, result.sampled[0].stop_token) == ("length", False)
    assert sequences.running == {}


def test_ends_are_banned_before_min_tokens() -> None:
    sequences = Sequences()
    data = new(stop_token_ids=(9, 2), end_token_ids=(2,), sampling=SamplingParams(min_tokens=2))
    banned = []
    for step, size in ((1, 5), (2, 1), (3, 1)):
        [row], _ = run(sequences, plan(step, Run(sequence=1, num_tokens=size), new=(data,) if step == 1 else ()), 4)
        assert row.sampling is not None
        banned.append(set(row.sampling.banned))
    assert banned == [{2, 9}, {2, 9}, set()]


def test_min_tokens_counts_tokens_from_before_a_takeover() -> None:
    data = new(token_ids=(1, 2, 3, 8, 8), prompt_len=3, end_token_ids=(2,), sampling=SamplingParams(min_tokens=2))
    [row], result = run(Sequences(), plan(1, Run(sequence=1, num_tokens=5), new=(data,)), 4)
    assert row.sampling is not None
    assert row.sampling.banned == ()
    assert result.sampled[0].position == 5


def test_logprobs_travel_with_the_token() -> None:
    sampled = Sampled(9, -0.5, ((9, -0.5), (3, -2.0)))
    _, result = run(Sequences(), plan(1, Run(sequence=1, num_tokens=5), new=(new(),)), sampled)
    logprob = result.sampled[0].logprob
    assert logprob is not None
    assert (logprob.logprob, logprob.top) == (-0.5, ((9, -0.5), (3, -2.0)))


def test_token_from_numbers_that_are_not_finite_is_an_error() -> None:
    sequences = Sequences()
    _, result = run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(),)), NO_TOKEN)
    assert result.sampled[0].finish_reason == "error"
    assert sequences.running == {}


def test_run_of_an_ended_sequence_is_counted_as_wasted() -> None:
    sequences = Sequences()
    run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(stop_token_ids=(9,)), new(2))), 9)
    rows, result = run(sequences, plan(2, Run(sequence=1), Run(sequence=2, num_tokens=5)), 8)
    assert (len(rows), result.num_wasted) == (1, 1)
    _, result = run(sequences, plan(3, Run(sequence=2)), 8)
    assert result.num_wasted == 0


def test_dropped_sequence_is_forgotten_and_a_second_drop_is_harmless() -> None:
    sequences = Sequences()
    run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(),)), 9)
    run(sequences, plan(2, drop=(1,)))
    assert sequences.running == {}
    run(sequences, plan(3, drop=(1,)))
    [ended] = sequences.take_ended()
    assert (ended.data.sequence, ended.started_s, ended.first_token_s, ended.num_generated) == (1, 1.0, 2.0, 1)
    assert sequences.take_ended() == []


def test_doubled_and_stale_plans_are_ignored() -> None:
    sequences = Sequences()
    run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(),), epoch=3), 9)
    assert sequences.begin(plan(1, Run(sequence=1, num_tokens=5), new=(new(),), epoch=3), 0.0) is None
    assert sequences.begin(plan(9, epoch=2), 0.0) is None
    assert list(sequences.running) == [1]


def test_gap_is_refused_until_a_new_epoch_begins() -> None:
    sequences = Sequences()
    run(sequences, plan(1))
    for step in (3, 4):
        with pytest.raises(PlanRefused, match=f"expected step 2 of epoch 1, got {step}"):
            sequences.begin(plan(step), 0.0)
    with pytest.raises(PlanRefused, match="expected step 1 of epoch 2"):
        sequences.begin(plan(2, epoch=2), 0.0)
    run(sequences, plan(1, epoch=3))


def test_higher_epoch_forgets_every_sequence() -> None:
    sequences = Sequences()
    run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(),)), 9)
    run(sequences, plan(1, epoch=2))
    assert sequences.running == {}
    assert [ended.data.sequence for ended in sequences.take_ended()] == [1]


def test_a_sequence_after_which_nothing_is_allowed_ends_without_a_token() -> None:
    sequences = Sequences()
    [_], result = run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(new(),)), NOTHING_ALLOWED)
    [sampled] = result.sampled
    assert (sampled.position, sampled.token, sampled.finish_reason, sampled.stop_token) == (5, -2, "stop", False)
    assert sequences.running == {}


def test_prompt_logprobs_are_collected_over_chunks_and_come_with_the_first_token() -> None:
    sequences = Sequences()
    data = new(sampling=SamplingParams(num_prompt_logprobs=1))
    rows = sequences.begin(plan(1, Run(sequence=1, num_tokens=3), new=(data,)), 1.0)
    assert rows is not None
    assert rows[0].scoring == Scoring((2, 3, 4), 1)
    scores = tuple(Sampled(token, -float(token), ((token, -float(token)),)) for token in (2, 3, 4, 5))
    assert sequences.finish(plan(1), [Scored(scores[:3], None)], 1.0).sampled == ()
    rows = sequences.begin(plan(2, Run(sequence=1, num_tokens=2)), 1.0)
    assert rows is not None
    assert rows[0].scoring == Scoring((5,), 1)
    [sampled] = sequences.finish(plan(2), [Scored(scores[3:], Sampled(9))], 1.0).sampled
    assert [logprob.logprob for logprob in sampled.prompt_logprobs] == [-2.0, -3.0, -4.0, -5.0]
    [row], result = run(sequences, plan(3, Run(sequence=1)), 8)
    assert row.scoring is None
    assert result.sampled[0].prompt_logprobs == ()


def test_prompt_logprobs_of_a_resumed_sequence_were_told_before() -> None:
    data = new(token_ids=(1, 2, 3, 8), prompt_len=3, sampling=SamplingParams(num_prompt_logprobs=1))
    [row], _ = run(Sequences(), plan(1, Run(sequence=1, num_tokens=4), new=(data,)), 4)
    assert row.scoring is None


# ---- forced tokens

CHOICE = LLMatcher.grammar_from_regex("a(xyz|b)c")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: read_token_bytes(None))


def bound(**changes: Any) -> NewSequence:
    return new(sampling=SamplingParams(grammar=CHOICE, seed=7, **changes.pop("sampling", {})), **changes)


def test_tokens_that_alone_can_follow_come_with_the_one_before_and_are_run_with_it(grammars: Grammars) -> None:
    sequences = Sequences(grammars=grammars, block_size=4)
    _, result = run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(bound(),)), ord("a"))
    assert result.sampled[0].forced == (), "two tokens can follow"
    _, result = run(sequences, plan(2, Run(sequence=1)), ord("x"))
    [sampled] = result.sampled
    assert (sampled.position, sampled.token, sampled.forced) == (6, ord("x"), tuple(b"yzc"))
    assert sampled.finish_reason == "stop"


def test_a_run_computes_forced_tokens_along(grammars: Grammars) -> None:
    sequences = Sequences(grammars=grammars, block_size=4)
    grammar = LLMatcher.grammar_from_regex("abc[xy]z")
    begun = new(sampling=SamplingParams(grammar=grammar, seed=7))
    _, result = run(sequences, plan(1, Run(sequence=1, num_tokens=5), new=(begun,)), ord("a"))
    assert result.sampled[0].forced == tuple(b"bc")
    [row], result = run(sequences, plan(2, Run(sequence=1)), ord("x"))
    assert (row.tokens, row.start) == (tuple(b"abc"), 5)
    assert row.sampling is not None
    assert row.sampling.position == 8
    assert (result.sampled[0].position, result.sampled[0].forced) == (8, tuple(b"z"))


@pytest.mark.parametrize(
    ("changes", "block_size", "forced"),
    [
        ({}, 4, b"yzc"),
        ({}, 0, b""),
        ({"blocks": (0, 1)}, 7, b"y"),
        ({"blocks": (0, 1)}, 4, b""),
        ({"max_len": 8}, 4, b"y"),
        ({"stop_token_ids": (ord("z"),)}, 4, b"yz"),
        ({"sampling": {"num_logprobs": 0}}, 4, b""),
        ({"sampling": {"bad_words": ((ord("z"),),)}}, 4, b"y"),
        ({"sampling": {"allowed_token_ids": tuple(b"axy")}}, 4, b"y"),
    ],
    ids=str,
)
def test_what_is_forced_ends_where_sampling_would(
    grammars: Grammars, changes: dict[str, Any], block_size: int, forced: bytes
) -> None:
    sequences = Sequences(grammars=grammars, block_size=block_size)
    data = bound(token_ids=(1, 2, 3, 4, 5, ord("a")), **changes)
    _, result = run(sequences, plan(1, Run(sequence=1, num_tokens=6), new=(data,)), ord("x"))
    assert result.sampled[0].forced == tuple(forced)
