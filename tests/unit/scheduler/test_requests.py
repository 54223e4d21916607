"""A request and its sequences: seeds, rank, resuming behind the log, and what recovery reads from it."""

import pytest

from schemas.errors import Cancelled
from schemas.output import ChoiceDelta, OutputChunk
from schemas.sampling import SamplingParams
from services.scheduler.recovery import durable_output
from services.scheduler.requests import SEED_RANGE, DurableChoice, choice_sampling
from tests.unit.scheduler.scheduling_traffic import request, sequence


@pytest.mark.parametrize("seed", [0, 5, SEED_RANGE - 1])
def test_each_choice_has_its_own_seed(seed: int) -> None:
    seeds = [choice_sampling(SamplingParams(seed=seed), index).seed for index in range(3)]
    assert seeds == [(seed + index) % SEED_RANGE for index in range(3)]
    held = request(n=3, sampling=SamplingParams(seed=seed))
    assert [s.to_new_sequence().sampling.seed for s in held.sequences] == seeds


def test_choices_go_on_behind_the_log() -> None:
    held = request(
        epoch=2, n=3, max_tokens=3, durable=(DurableChoice(token_ids=(7,)), DurableChoice(token_ids=(7, 8, 9)))
    )
    first, second, third = held.sequences
    assert held.is_resumed
    assert (first.status, first.num_generated, first.num_durable) == ("waiting", 1, 1)
    assert (second.status, second.finish_reason) == ("finished", "length")
    assert (third.status, third.num_generated) == ("waiting", 0)
    assert not held.is_finished


def test_choice_that_the_log_says_is_finished_stays_so() -> None:
    held = request(epoch=2, durable=(DurableChoice(token_ids=(7,), is_finished=True),))
    assert (held.sequences[0].status, held.sequences[0].finish_reason) == ("finished", None)
    assert held.is_finished


def test_error_finishes_the_request() -> None:
    held = request()
    held.error = Cancelled("x")
    assert held.is_finished


def test_pending_tokens_can_be_planned_but_the_last_token_never_is() -> None:
    item = sequence(prompt_len=5, max_tokens=3)
    assert (item.num_to_run, item.is_decoding, item.num_to_cover(100)) == (5, False, 8)
    for _ in range(3):
        item.plan(item.num_to_run)
    assert (item.num_planned, item.num_pending, item.num_to_run) == (7, 3, 0)


def chunk(*deltas: ChoiceDelta, epoch: int = 1, final: bool = False) -> OutputChunk:
    return OutputChunk(request_id="r", model="smol", created_s=0.0, epoch=epoch, choices=deltas, final=final)


def test_log_is_folded_into_tokens_by_choice() -> None:
    durable = durable_output(
        [
            chunk(ChoiceDelta(index=0, start=0, token_ids=(1, 2)), ChoiceDelta(index=1, start=0, token_ids=(3,))),
            chunk(epoch=3),
            chunk(ChoiceDelta(index=1, start=1, token_ids=(4,), finish_reason="stop"), epoch=3),
        ],
        2,
    )
    assert durable.choices == (
        DurableChoice(token_ids=(1, 2)),
        DurableChoice(token_ids=(3, 4), is_finished=True),
    )
    assert (durable.epoch, durable.is_final) == (3, False)


def test_empty_and_complete_logs() -> None:
    assert durable_output([], 1).choices == (DurableChoice(),)
    assert (durable_output([], 1).epoch, durable_output([], 1).is_final) == (0, False)
    assert durable_output([chunk(final=True)], 1).is_final
