"""What one service made of its input, compared: sequences of an executor, work items of a tokenizer, and the report."""

from dataclasses import replace

import pytest

from schemas.generation import OutputSpec, WorkItem
from schemas.sampling import SamplingParams
from schemas.step import NewSequence, SampledToken, StepPlan, StepResult, TokenLogprob
from services.recording import stage_report
from services.recording.comparison import Comparison, Rules
from services.recording.sequence_outcomes import SequenceReader, compare_sequences
from services.recording.work_comparison import compare_work

BEGUN = NewSequence(
    sequence=1,
    request_id="r",
    index=2,
    token_ids=(5, 6),
    prompt_len=2,
    max_len=9,
    blocks=(0,),
    sampling=SamplingParams(),
)


def sequences(*tokens: SampledToken):
    reader = SequenceReader()
    reader.see_result("e", StepResult(executor="e", epoch=1, step=1, sampled=tokens))  # nothing has begun yet
    reader.see_plan("e", StepPlan(scheduler="s", epoch=1, step=1, new=(BEGUN,)))
    for step, token in enumerate(tokens, 1):
        reader.see_result("e", StepResult(executor="e", epoch=1, step=step, sampled=(token,)))
    return reader.sequences


def token(position: int, number: int, **options) -> SampledToken:
    return SampledToken(sequence=1, position=position, token=number, **options)


def first_difference(ours, other):
    differences = compare_sequences(sequences(*ours), sequences(*other), Rules()).differences
    return [(d.request_id, d.choice, d.what, d.position, d.expected, d.found) for d in differences]


OURS = (token(2, 11), token(3, 12, finish_reason="length"))


def test_equal_sequences_are_counted_with_their_tokens():
    result = compare_sequences(sequences(*OURS), sequences(*OURS), Rules())
    assert (result.num_compared, result.num_tokens, result.differences) == (1, 2, [])


@pytest.mark.parametrize(
    ("other", "what", "position"),
    [
        ((token(2, 11), token(3, 99)), "tokens", 1),
        ((token(2, 11),), "tokens", 1),
        ((token(2, 11), token(3, 12, finish_reason="stop")), "finish_reason", 1),
    ],
)
def test_the_first_difference_is_named_by_request_choice_and_generated_token(other, what, position):
    ((request_id, choice, found, number, *_),) = first_difference(OURS, other)
    assert (request_id, choice, found, number) == ("r", 2, what, position)


def test_logprobs_and_embeddings_are_compared_too():
    ours = token(2, 11, logprob=TokenLogprob(logprob=-1.0), prompt_logprobs=(TokenLogprob(logprob=-0.5),))
    near = token(2, 11, logprob=TokenLogprob(logprob=-1.001), prompt_logprobs=(TokenLogprob(logprob=-0.5),))
    far = token(2, 11, logprob=TokenLogprob(logprob=-1.0), prompt_logprobs=(TokenLogprob(logprob=-0.6),))
    assert first_difference((ours,), (near,)) == []
    assert [found[2:] for found in first_difference((ours,), (far,))] == [("logprob", 0, -0.5, -0.6)]
    one, other = (token(2, -1, embedding=text, finish_reason="stop") for text in ("AACAPw==", "AAAAQA=="))
    assert [found[2:] for found in first_difference((one,), (other,))] == [("embedding", 0, [1.0], [2.0])]


def test_forced_tokens_stand_as_if_each_had_been_sampled():
    forced = (token(2, 11, forced=(12, 13), finish_reason="length"),)
    alone = (token(2, 11), token(3, 12), token(4, 13, finish_reason="length"))
    assert first_difference(forced, alone) == []


def work(**changes) -> WorkItem:
    spec = OutputSpec(request_id="r", model="smol", created_s=100.0, num_prompt_tokens=3, stop=("a", "b"))
    item = WorkItem(
        request_id="r",
        model="smol",
        created_s=100.0,
        deadline_s=105.0,
        prompt_token_ids=(1, 2, 3),
        max_tokens=8,
        sampling=SamplingParams(seed=4),
        tokenizer="tokenizer-0",
        output=spec,
    )
    return item.model_copy(update=changes)


def test_a_work_item_of_another_moment_and_place_is_the_same():
    elsewhere = work(created_s=900.0, deadline_s=905.0, tokenizer="tokenizer-7")
    spec = elsewhere.output.model_copy(update={"created_s": 900.0, "reply": "_INBOX.x", "traceparent": "00-a-b-01"})
    assert list(compare_work(work(), elsewhere.model_copy(update={"output": spec}))) == []


def test_what_differs_in_a_work_item_is_named_with_its_position():
    found = {
        d.what: d.position for d in compare_work(work(), work(prompt_token_ids=(1, 2, 9), sampling=SamplingParams()))
    }
    assert found == {"work.prompt_token_ids": 2, "work.sampling.seed": None}
    assert [d.what for d in compare_work(work(), work(deadline_s=106.0))] == ["work.deadline"]
    assert [d.found for d in compare_work(work(), work(deadline_s=None))] == [None]


def test_the_report_says_what_a_recording_does_not_hold():
    parts = {"requests": Comparison(num_compared=2, num_tokens=9), "outputs": Comparison(unit="outputs")}
    assert stage_report.as_text(parts).splitlines() == [
        "EQUAL: 2 requests with 9 tokens.",
        "The recording holds no outputs to compare.",
    ]
    assert stage_report.as_json("tokenizer", parts)["equal"] is True
    (difference,) = compare_work(work(), work(max_tokens=9))
    different = {"requests": replace(parts["requests"], differences=[difference])}
    assert stage_report.as_json("tokenizer", different)["equal"] is False
