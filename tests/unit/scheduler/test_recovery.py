"""What the output log tells of a request that is handed out again."""

from schemas.output import ChoiceDelta, OutputChunk
from services.scheduler.recovery import durable_output


def chunk(*choices: ChoiceDelta, epoch: int = 1, final: bool = False) -> OutputChunk:
    return OutputChunk(request_id="r", model="smol", created_s=0.0, epoch=epoch, choices=choices, final=final)


def test_log_is_folded_by_choice() -> None:
    found = durable_output(
        [
            chunk(ChoiceDelta(index=0, token_ids=(1, 2)), ChoiceDelta(index=1, token_ids=(7,))),
            chunk(epoch=4),
            chunk(ChoiceDelta(index=0, start=2, token_ids=(3,), finish_reason="stop"), epoch=4),
        ],
        2,
    )
    assert [(choice.token_ids, choice.is_finished) for choice in found.choices] == [((1, 2, 3), True), ((7,), False)]
    assert (found.epoch, found.is_final) == (4, False)


def test_choice_whose_beginning_the_log_has_lost_is_generated_again() -> None:
    found = durable_output(
        [chunk(ChoiceDelta(start=5, token_ids=(6, 7))), chunk(ChoiceDelta(start=7, token_ids=(8,)))], 1
    )
    assert found.choices[0].token_ids == ()
