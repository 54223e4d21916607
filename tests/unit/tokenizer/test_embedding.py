"""Requests for an embedding: what they become, and the errors that name the field."""

import json
from typing import Any

import pytest

from schemas.codec import decode
from schemas.control import ExecutorCapacity
from schemas.errors import InvalidParameter, NatterjackError, UnsupportedParameter
from schemas.generation import GenerateRequest, OutputSpec, WorkItem
from schemas.output import NewTokens
from schemas.sampling import Pooling
from services.tokenizer.embedding import check_embedding_capacity
from services.tokenizer.request_output import RequestOutput
from services.tokenizer.validation import Arrival, Validator
from services.tokenizer.vocabulary import byte_vocabulary

BYTES = byte_vocabulary()
VALIDATOR = Validator("smol", BYTES, None)
MAX_MESSAGE_BYTES = 1 << 20


def request_of(**fields: Any) -> GenerateRequest:
    return decode(GenerateRequest, {}, json.dumps({"prompt": "ab", "pooling": "mean", **fields}).encode())


def work_of(**fields: Any) -> WorkItem:
    request = request_of(**fields)
    VALIDATOR.check(request)
    arrival = Arrival("req-1", 1000.0, 7, "tokenizer-0", None, None)
    tokens = VALIDATOR.truncate(request, VALIDATOR.encode(request), 100)
    return VALIDATOR.to_work(request, tokens, arrival, 100)


def refusal(**fields: Any) -> NatterjackError:
    with pytest.raises(NatterjackError) as raised:
        work_of(**fields)
    return raised.value


def capacity(embedding_size: int, engine: str = "native") -> ExecutorCapacity:
    return ExecutorCapacity(
        engine=engine, model_file="m", device="cpu", kernels="k", vocab_size=257, max_model_len=100, block_size=16,
        num_blocks=8, embedding_size=embedding_size,
    )  # fmt: skip


def test_the_mean_is_computed_as_a_whole_and_the_last_takes_what_is_cached() -> None:
    mean, last = work_of(dimensions=3, timeout_s=5.0, priority="low"), work_of(pooling="last")
    assert mean.sampling.pooling == Pooling(kind="mean", dimensions=3)
    assert (mean.skip_reading_prefix_cache, mean.max_tokens, mean.output.prompt_only) == (True, 1, True)
    assert (mean.deadline_s, mean.priority) == (1005.0, "low")
    assert last.sampling.pooling == Pooling(kind="last")
    assert not last.skip_reading_prefix_cache


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": 0.5}, "temperature"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": None, "messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ({"normalize": False}, "normalize"),
        ({"pooling": None, "dimensions": 3}, "dimensions"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_does_not_go_with_an_embedding_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_options_that_ask_for_nothing_are_taken() -> None:
    assert work_of(n=1, echo=None, normalize=True, user="ann").sampling.pooling is not None


def test_a_prompt_that_is_too_long_is_told_with_both_lengths() -> None:
    error = refusal(prompt="x" * 100)
    assert (error.code, error.param, error.details) == (
        "context_length_exceeded", "prompt", {"max_model_len": 100, "num_prompt_tokens": 100},
    )  # fmt: skip
    assert len(work_of(prompt="x" * 100, truncate_prompt_tokens=-1).prompt_token_ids) == 99


def test_an_engine_without_hidden_states_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedParameter, match="echo") as raised:
        check_embedding_capacity(request_of(), [capacity(0, "echo")], MAX_MESSAGE_BYTES)
    assert raised.value.param == "model"


def test_dimensions_are_at_most_the_models_own() -> None:
    check_embedding_capacity(request_of(dimensions=64), [capacity(64)], MAX_MESSAGE_BYTES)
    check_embedding_capacity(request_of(dimensions=64), [], MAX_MESSAGE_BYTES)  # nobody knows yet
    with pytest.raises(InvalidParameter) as raised:
        check_embedding_capacity(request_of(dimensions=65), [capacity(64)], MAX_MESSAGE_BYTES)
    assert raised.value.param == "dimensions"


def test_a_vector_larger_than_a_message_is_refused_and_a_shorter_one_is_not() -> None:
    check_embedding_capacity(request_of(), [capacity(10_000)], 64 << 10)
    check_embedding_capacity(request_of(dimensions=10_000), [capacity(100_000)], 64 << 10)
    with pytest.raises(UnsupportedParameter, match="fewer dimensions") as raised:
        check_embedding_capacity(request_of(), [capacity(100_000)], 64 << 10)
    assert raised.value.param == "dimensions"


def test_the_vector_is_said_once_in_the_final_chunk() -> None:
    spec = OutputSpec(request_id="r", model="smol", created_s=1.0, num_prompt_tokens=5, prompt_only=True)
    output = RequestOutput(spec, 1, BYTES)
    end = NewTokens(request_id="r", epoch=1, start=0, finish_reason="stop", embedding="AACAPw==")
    output.feed(end)
    chunk = output.take_chunk()
    assert chunk is not None
    assert (chunk.final, chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (True, 5, 0)
    [delta] = chunk.choices
    assert (delta.embedding, delta.finish_reason, delta.text, delta.token_ids) == ("AACAPw==", "stop", "", ())
    output.feed(end)
    assert output.take_chunk() is None
