"""Properties of the one codec: what is encoded is decoded, errors name the field."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.cache import Acquire, CacheCommand, Extend, Lease, OpenPool, Release
from schemas.codec import decode, encode, schema_of
from schemas.errors import MalformedMessage, SchemaVersionUnsupported
from schemas.generation import GenerateRequest
from schemas.output import ChoiceDelta, OutputChunk
from schemas.step import SampledToken, StepResult, TokenLogprob

ints = st.integers(0, 2**40)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=20)
token_ids = st.lists(ints, max_size=5).map(tuple)

operations = st.one_of(
    st.builds(
        OpenPool,
        incarnation=texts,
        num_blocks=ints,
        block_size=ints,
        leases=st.lists(st.builds(Lease, sequence=ints, blocks=token_ids), max_size=3).map(tuple),
    ),
    st.builds(Acquire, sequence=ints, request_id=texts, num_tokens=ints, traceparent=st.none() | texts),
    st.builds(Extend, sequence=ints, num_tokens=ints, num_held=ints),
    st.builds(Release, sequence=ints),
)
logprobs = st.builds(TokenLogprob, logprob=floats, top=st.lists(st.tuples(ints, floats), max_size=3).map(tuple))
sampled = st.builds(
    SampledToken,
    sequence=ints,
    position=ints,
    token=ints,
    logprob=st.none() | logprobs,
    finish_reason=st.sampled_from([None, "stop", "length", "error"]),
    stop_token=st.booleans(),
)


@given(st.lists(operations, max_size=5).map(tuple))
def test_cache_command_round_trip(operations: tuple[object, ...]) -> None:
    command = CacheCommand.model_validate({"scheduler": "s", "executor": "e", "epoch": 1, "operations": operations})
    assert decode(CacheCommand, {}, encode(command)) == command


@given(st.lists(sampled, max_size=4).map(tuple), floats, st.none() | texts)
def test_step_result_round_trip(tokens: tuple[SampledToken, ...], duration_s: float, fault: str | None) -> None:
    result = StepResult(executor="e", epoch=1, step=2, sampled=tokens, duration_s=duration_s, fault=fault)
    assert decode(StepResult, {"Nj-Schema": schema_of(result)}, encode(result)) == result


@given(texts, token_ids, st.none() | texts | ints)
def test_output_chunk_round_trip(text: str, tokens: tuple[int, ...], stop_reason: str | int | None) -> None:
    delta = ChoiceDelta(token_ids=tokens, text=text, stop_reason=stop_reason)
    chunk = OutputChunk(request_id="r", model="m", created_s=1.5, epoch=1, choices=(delta,))
    assert decode(OutputChunk, {}, encode(chunk)) == chunk


@given(st.one_of(texts, token_ids), floats.filter(lambda x: 0 <= x <= 2), st.none() | st.lists(texts).map(tuple))
def test_generate_request_round_trip(
    prompt: str | tuple[int, ...], temperature: float, stop: tuple[str, ...] | None
) -> None:
    request = GenerateRequest(prompt=prompt, temperature=temperature, stop=stop)
    assert decode(GenerateRequest, {}, encode(request)) == request


def test_defaults_do_not_travel() -> None:
    assert encode(GenerateRequest(prompt="x")) == b'{"prompt":"x"}'


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_decoded_or_refused_with_a_coded_error(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(StepResult, {}, b"[" + body)


def test_complaint_about_a_version_does_not_echo_a_long_header() -> None:
    with pytest.raises(SchemaVersionUnsupported) as caught:
        decode(StepResult, {"Nj-Schema": "x" * 10_000}, b"{}")
    assert len(caught.value.message) < 500


def test_infinity_cannot_be_put_into_a_message() -> None:
    with pytest.raises(ValueError, match="finite"):
        StepResult(executor="e", epoch=1, step=1, duration_s=math.inf)
