"""The wire format is frozen: every message has a golden file, and today's code reads it as the object below.

A golden file is what a sender of this version put on the bus. Change one only together with the message's `MAJOR`.
"""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import schemas
from schemas.cache import Acquire, CacheCommand, CacheReply, Extend, Grant, Lease, OpenPool, Register, Release
from schemas.codec import SCHEMA_HEADER, Message, decode, encode, schema_of
from schemas.control import (
    BuildFacts,
    CacheOwnership,
    Cancel,
    ConfigValue,
    ControlReply,
    ControlRequest,
    DeadLetter,
    EffectiveConfig,
    ExecutorCapacity,
    HandedBack,
    KeepTrace,
    Pause,
    Registration,
    SchedulerLease,
)
from schemas.errors import (
    ErrorBody,
    ErrorReply,
    InvalidParameter,
    MalformedMessage,
    QueueFull,
    SchemaVersionUnsupported,
    from_body,
)
from schemas.generation import Accepted, ChatMessage, GenerateRequest, OutputSpec, TextPart, WorkItem
from schemas.output import (
    ChoiceDelta,
    Feedback,
    NewTokens,
    OpenOutput,
    OutputChunk,
    OutputFeedback,
    RequestFailed,
    TokenBatch,
    TokenText,
    Usage,
)
from schemas.responses import AskedResponse, FunctionCallItem, FunctionCallOutputItem, MessageItem, StoredResponse
from schemas.responses import TextPart as ResponseText
from schemas.sampling import SamplingParams
from schemas.step import NewSequence, Run, SampledToken, StepPlan, StepResult, TokenLogprob
from schemas.telemetry import (
    FinishedSpan,
    MetricSample,
    SampledHistogram,
    SampledValue,
    SpanBatch,
    SpanEvent,
    TraceDecision,
    TraceQuery,
    TraceReply,
    WaterfallRow,
)
from schemas.tokenization import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from schemas.tools import Tool, ToolFunction

GOLDEN = Path(__file__).with_name("golden")
SPAN_ATTRIBUTES = {"natterjack.choice": 1, "gen_ai.request.model": "smol", "is_first": True, "share": 0.5}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

for module in pkgutil.iter_modules(schemas.__path__, "schemas."):
    importlib.import_module(module.name)
MESSAGES: list[type[Message]] = sorted(
    (kind for kind in Message.__subclasses__() if kind.__module__.startswith("schemas.")), key=lambda kind: kind.SCHEMA
)

SPEC = OutputSpec(
    request_id="req-1",
    model="smol",
    created_s=1700000000.5,
    num_prompt_tokens=3,
    n=2,
    reply="_INBOX.abc",
    stop=("END", "\n\n"),
    include_stop=True,
    skip_special_tokens=False,
    num_logprobs=2,
    traceparent=TRACE,
)
SAMPLING = SamplingParams(
    temperature=0.5, top_k=40, top_p=0.9, min_p=0.05, seed=2**63 - 1, min_tokens=2, num_logprobs=2
)

EXPECTED: dict[str, Message] = {
    "generate_request": GenerateRequest(
        model="smol",
        request_id="req-1",
        messages=(
            ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="user", content=(TextPart(type="text", text="Grüße 🐸"),), name="ann"),
        ),
        max_tokens=64,
        temperature=0.0,
        stop=("END",),
        seed=7,
        priority="high",
        deliver="log",
    ),
    "stored_response": StoredResponse(
        request_id="req-2",
        model="smol",
        created_s=1700000000.5,
        num_prompt_tokens=9,
        before=(
            MessageItem(role="user", content="Which day?"),
            FunctionCallItem(type="function_call", call_id="call_1", name="today", arguments="{}"),
            FunctionCallOutputItem(type="function_call_output", call_id="call_1", output="Monday"),
        ),
        body=AskedResponse(
            input=(MessageItem(role="user", content=(ResponseText(type="input_text", text="And then?"),)),),
            instructions="Be brief.",
            metadata={"team": "a"},
            background=True,
        ),
        deleted=True,
    ),
    "accepted": Accepted(request_id="req-1", model="smol", num_prompt_tokens=3, created_s=1700000000.5),
    "work_item": WorkItem(
        request_id="req-1",
        model="smol",
        priority="low",
        created_s=1700000000.5,
        deadline_s=1700000060.5,
        prompt_token_ids=(1, 504, 253),
        max_tokens=16,
        n=2,
        sampling=SAMPLING,
        stop_token_ids=(2,),
        end_token_ids=(2,),
        cache_salt="tenant-1",
        skip_reading_prefix_cache=True,
        tokenizer="tokenizer-0",
        output=SPEC,
    ),
    "cache_command": CacheCommand(
        scheduler="scheduler-0",
        executor="executor-0",
        epoch=4,
        operations=(
            OpenPool(
                incarnation="a1",
                num_blocks=128,
                num_host_blocks=256,
                block_size=16,
                leases=(Lease(sequence=1, blocks=(0, 1), keys=("aa",)),),
            ),
            Acquire(sequence=2, request_id="req-2", num_tokens=17, keys=("aa", "bb"), traceparent=TRACE),
            Extend(sequence=1, num_tokens=33, num_held=2),
            Register(sequence=1, first=1, keys=("cc",)),
            Release(sequence=1),
        ),
        num_copies=7,
    ),
    "cache_reply": CacheReply(
        grants=(Grant(sequence=2, blocks=(2, 3), num_cached=32, num_loaded=16), Grant(sequence=1, granted=False)),
        num_free=124,
        num_blocks=128,
        num_flushes=2,
        copies=((3, 128), (140, 3)),
        num_copies=7,
        manager_epoch=3,
    ),
    "step_plan": StepPlan(
        scheduler="scheduler-0",
        epoch=4,
        step=12,
        drop=(7,),
        copies=((3, 128), (140, 3)),
        new=(
            NewSequence(
                sequence=9,
                request_id="req-1",
                index=1,
                token_ids=(1, 504, 253),
                prompt_len=3,
                max_len=19,
                num_computed=0,
                blocks=(4,),
                sampling=SAMPLING,
                stop_token_ids=(2,),
                end_token_ids=(2,),
                traceparent=TRACE,
            ),
        ),
        run=(Run(sequence=8), Run(sequence=9, num_tokens=3, blocks=(5,))),
    ),
    "step_result": StepResult(
        executor="executor-0",
        epoch=4,
        step=12,
        sampled=(
            SampledToken(sequence=8, position=20, token=504),
            SampledToken(
                sequence=9,
                position=3,
                token=2,
                logprob=TokenLogprob(logprob=-0.25, top=((2, -0.25), (504, -1.5))),
                finish_reason="stop",
                stop_token=True,
            ),
        ),
        num_wasted=1,
        duration_s=0.0125,
        idle_s=0.001,
        fault="gap",
    ),
    "token_batch": TokenBatch(
        scheduler="scheduler-0",
        opened=(OpenOutput(spec=SPEC, epoch=4, log_sequence=11, history=((504,), ())),),
        tokens=(
            NewTokens(
                request_id="req-1",
                epoch=4,
                index=1,
                start=2,
                token_ids=(253, 2),
                logprobs=(TokenLogprob(logprob=-1.0), TokenLogprob(logprob=-0.25, top=((2, -0.25),))),
                finish_reason="stop",
                stop_token=True,
                num_cached=16,
            ),
        ),
        failed=(
            RequestFailed(
                request_id="req-3",
                epoch=4,
                error=ErrorBody(message="No room.", type="overloaded_error", code="queue_full"),
            ),
        ),
    ),
    "output_feedback": OutputFeedback(
        tokenizer="tokenizer-0",
        items=(
            Feedback(request_id="req-1", epoch=4, event="stopped", index=1, num_tokens=5),
            Feedback(request_id="req-2", epoch=4, event="stored"),
        ),
    ),
    "output_chunk": OutputChunk(
        request_id="req-1",
        model="smol",
        created_s=1700000000.5,
        epoch=4,
        choices=(
            ChoiceDelta(
                index=1,
                start=2,
                token_ids=(253, 2),
                text=" the",
                logprobs=(
                    TokenText(
                        token_id=253,
                        token=" the",
                        token_bytes=(32, 116, 104, 101),
                        logprob=-0.5,
                        top=(TokenText(token_id=253, token=" the", token_bytes=(32, 116, 104, 101), logprob=-0.5),),
                    ),
                ),
                finish_reason="stop",
                stop_reason="END",
            ),
        ),
        final=True,
        usage=Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2),
        error=ErrorBody(
            message="Cancelled.", type="cancelled_error", param="model", code="cancelled", details={"after": 4}
        ),
        request_digest="0123456789abcdef",
    ),
    "tokenize_request": TokenizeRequest(
        model="smol",
        messages=(ChatMessage(role="user", content="Hi"),),
        prompt=None,
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=False,
        chat_template_kwargs={"after": 1},
        tools=(Tool(type="function", function=ToolFunction(name="f")),),
        return_token_strs=True,
    ),
    "tokenize_reply": TokenizeReply(count=2, max_model_len=8192, tokens=(1, 504), token_strs=("<s>", "Hi")),
    "detokenize_request": DetokenizeRequest(model="smol", tokens=(1, 504)),
    "detokenize_reply": DetokenizeReply(prompt="<s>Hi"),
    "dead_letter": DeadLetter(
        request_id="req-1",
        reason="Gave up after 5 attempts to serve this request.",
        num_delivered=6,
        died_s=1700000000.5,
        scheduler="scheduler-0",
        work=WorkItem(
            request_id="req-1",
            model="smol",
            created_s=1700000000.5,
            prompt_token_ids=(1, 504),
            max_tokens=16,
            sampling=SamplingParams(seed=3),
            tokenizer="tokenizer-0",
            output=OutputSpec(request_id="req-1", model="smol", created_s=1700000000.5, num_prompt_tokens=2),
        ),
        body="{",
    ),
    "cancel": Cancel(request_id="req-1", reason="the client left"),
    "keep_trace": KeepTrace(trace_id="0af7651916cd43dd8448eb211c80319c"),
    "handed_back": HandedBack(scheduler="scheduler-0", request_ids=("req-1", "req-2"), at_s=1700000000.5),
    "pause": Pause(model="smol", in_flight="hold", since_s=1700000000.5),
    "cache_ownership": CacheOwnership(model="smol", cache_manager="cache_manager-0", incarnation="a1"),
    "control_request": ControlRequest(command="pause", instance="scheduler-0", arguments={"in_flight": "hold"}),
    "control_reply": ControlReply(
        instance="scheduler-0",
        role="scheduler",
        command="pause",
        result={"paused": True},
        error=ErrorBody(message="The bus went away.", type="unavailable_error", code="service_unavailable"),
    ),
    "span_batch": SpanBatch(
        instance="executor-0",
        role="executor",
        spans=(
            FinishedSpan(
                trace_id="0af7651916cd43dd8448eb211c80319c",
                span_id="b7ad6b7169203331",
                parent_id="00f067aa0ba902b7",
                name="executor.decode",
                kind="consumer",
                start_s=1700000000.5,
                duration_s=0.25,
                attributes=SPAN_ATTRIBUTES,
                events=(SpanEvent(name="first", offset_s=0.125, attributes=SPAN_ATTRIBUTES),),
                links=("b9c7c989f97918e1",),
                error="unavailable",
            ),
        ),
        num_dropped=3,
    ),
    "metric_sample": MetricSample(
        instance="executor-0",
        incarnation="a1",
        role="executor",
        time_s=1700000000.5,
        values=(SampledValue(name="kv_cache_usage_perc", labels={"executor": "executor-0"}, value=0.25),),
        histograms=(
            SampledHistogram(
                name="step_seconds", labels={"executor": "executor-0"}, bounds=(0.001, 0.01), counts=(1, 2, 3)
            ),
        ),
    ),
    "trace_query": TraceQuery(request="req-1"),
    "trace_reply": TraceReply(
        request="req-1",
        trace_id="0af7651916cd43dd8448eb211c80319c",
        request_ids=("req-1", "req-2"),
        started_s=1700000000.5,
        duration_s=0.75,
        error="cancelled",
        rows=(
            WaterfallRow(
                span_id="b7ad6b7169203331",
                depth=2,
                name="executor.decode",
                instance="executor-0",
                role="executor",
                offset_s=0.25,
                duration_s=0.5,
                attributes=SPAN_ATTRIBUTES,
                events=(SpanEvent(name="first", offset_s=0.125, attributes=SPAN_ATTRIBUTES),),
                error="unavailable",
            ),
        ),
        decisions=(TraceDecision(kind="queued", offset_s=0.125, text="waited 10 ms"),),
        num_missing=1,
    ),
    "registration": Registration(
        instance="executor-0",
        incarnation="a1",
        role="executor",
        model="smol",
        state="ready",
        stage="ready",
        progress=1.0,
        detail="warm",
        pid=4711,
        host="box",
        version="0.1.0",
        started_s=1700000000.5,
        heartbeat_s=0.5,
        silent_after_s=2.5,
        capacity=ExecutorCapacity(
            engine="reference",
            model_file="smol.gguf",
            device="cpu",
            kernels="torch",
            vocab_size=49152,
            max_model_len=2048,
            block_size=16,
            num_blocks=128,
        ),
        load={"num_requests_running": 2.0},
    ),
    "scheduler_lease": SchedulerLease(
        executor="executor-0", scheduler="scheduler-0", scheduler_incarnation="b2", executor_incarnation="a1"
    ),
    "effective_config": EffectiveConfig(
        instance="gateway-0",
        incarnation="c3",
        version="0.1.0",
        values={"gateway.port": ConfigValue(value=8000, source="default")},
        build=BuildFacts(
            commit="8f0c1d2",
            python="3.11.9",
            platform="Linux 6.1 x86_64",
            cpu_model="A processor",
            cpu_features=("avx2", "fma"),
            num_cpus=2,
            schemas={"step_plan": 1},
        ),
    ),
}


def golden(schema: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the headers and the body of a golden file."""
    content = json.loads((GOLDEN / f"{schema}.json").read_text(encoding="utf-8"))
    return content["headers"], content["body"]


def as_bytes(body: object) -> bytes:
    return json.dumps(body).encode()


every_message = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.SCHEMA)


def test_every_message_has_a_golden_file_and_every_golden_file_a_message() -> None:
    files = {path.stem for path in GOLDEN.glob("*.json")} - {"error_reply"}
    assert files == set(EXPECTED) == {kind.SCHEMA for kind in MESSAGES}


@every_message
def test_golden_file_is_read_as_the_expected_object(kind: type[Message]) -> None:
    headers, body = golden(kind.SCHEMA)
    assert decode(kind, headers, as_bytes(body)) == EXPECTED[kind.SCHEMA]


@every_message
def test_what_is_sent_today_is_the_golden_file(kind: type[Message]) -> None:
    headers, body = golden(kind.SCHEMA)
    assert json.loads(encode(EXPECTED[kind.SCHEMA])) == body
    assert headers == {SCHEMA_HEADER: schema_of(kind)}


@every_message
def test_golden_file_uses_every_field(kind: type[Message]) -> None:
    unused = {name for name, field in kind.model_fields.items() if name not in EXPECTED[kind.SCHEMA].model_fields_set}
    # A GenerateRequest has either messages or a prompt, and many options of one kind.
    assert not unused or kind is GenerateRequest


@every_message
def test_unknown_fields_at_any_depth_are_ignored(kind: type[Message]) -> None:
    headers, body = golden(kind.SCHEMA)
    decoded = decode(kind, headers, as_bytes(_with_unknown_fields(body, kind)))
    ours = decoded.model_dump(exclude={"from_a_newer_version"})
    assert ours == EXPECTED[kind.SCHEMA].model_dump()


def _with_unknown_fields(body: Any, kind: type[Message] | None = None) -> Any:
    if isinstance(body, list):
        return [_with_unknown_fields(item) for item in body]
    if not isinstance(body, dict) or set(body) in (
        {"num_requests_running"},
        {"gateway.port"},
        {"step_plan"},
        {"after"},
        {"executor"},
        {"in_flight"},
        {"paused"},
        {"team"},
        {"natterjack.choice", "gen_ai.request.model", "is_first", "share"},
    ):
        return body  # free-form dictionaries keep every key
    if kind is None and "role" in body and "content" in body:
        return body  # a chat message keeps what its template may know
    return {**{key: _with_unknown_fields(value) for key, value in body.items()}, "from_a_newer_version": {"x": [1]}}


@every_message
def test_message_without_a_schema_header_is_taken_for_the_current_version(kind: type[Message]) -> None:
    _, body = golden(kind.SCHEMA)
    assert decode(kind, {}, as_bytes(body)) == EXPECTED[kind.SCHEMA]


@every_message
def test_unknown_major_version_is_refused(kind: type[Message]) -> None:
    _, body = golden(kind.SCHEMA)
    with pytest.raises(SchemaVersionUnsupported, match=f"{kind.SCHEMA}/1") as caught:
        decode(kind, {SCHEMA_HEADER: f"{kind.SCHEMA}/{kind.MAJOR + 1}"}, as_bytes(body))
    assert caught.value.body().code == "schema_version_unsupported"


@every_message
def test_another_message_is_refused(kind: type[Message]) -> None:
    _, body = golden(kind.SCHEMA)
    with pytest.raises(SchemaVersionUnsupported):
        decode(kind, {SCHEMA_HEADER: "something_else/1"}, as_bytes(body))


@every_message
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"7"])
def test_what_is_no_json_object_is_malformed(kind: type[Message], body: bytes) -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode(kind, {}, body)
    assert caught.value.code == "malformed_message"
    assert caught.value.param is None


REQUIRED = [(kind, name) for kind in MESSAGES for name, field in kind.model_fields.items() if field.is_required()]


@pytest.mark.parametrize(("kind", "name"), REQUIRED, ids=lambda value: getattr(value, "SCHEMA", value))
def test_missing_or_mistyped_field_is_named(kind: type[Message], name: str) -> None:
    _, body = golden(kind.SCHEMA)
    for wrong in ({key: value for key, value in body.items() if key != name}, {**body, name: [{"wrong": 1}]}):
        with pytest.raises(InvalidParameter) as caught:
            decode(kind, {}, as_bytes(wrong))
        assert caught.value.param is not None
        assert caught.value.param.split(".")[0] == name


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "12"}, "max_tokens"),
        ({"n": True}, "n"),
        ({"prompt": [1, "two"]}, "prompt"),
        ({"stop": [1]}, "stop"),
        ({"priority": "urgent"}, "priority"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"content": "no role"}]}, "messages.0.role"),
        ({"request_id": ""}, "request_id"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
    ids=str,
)
def test_wrong_value_in_a_request_names_the_field_without_echoing_it(change: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        decode(GenerateRequest, {}, as_bytes({"model": "smol", **change}))
    assert caught.value.param is not None
    assert caught.value.param == param or caught.value.param.startswith(f"{param}.")
    value = next(iter(change.values()))
    assert not isinstance(value, str) or not value or value not in caught.value.message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(number: str) -> None:
    with pytest.raises((InvalidParameter, MalformedMessage)):
        decode(GenerateRequest, {}, b'{"prompt": "x", "temperature": ' + number.encode() + b"}")


def test_options_of_a_request_that_are_not_listed_are_kept_for_the_tokenizer_to_judge() -> None:
    request = decode(GenerateRequest, {}, b'{"prompt": "x", "suffix": {"1": 2}}')
    assert request.model_extra == {"suffix": {"1": 2}}


def test_error_reply_golden_file_is_read_as_the_same_error() -> None:
    headers, body = golden("error_reply")
    assert headers == {"Nats-Service-Error-Code": "503", "Nats-Service-Error": "The work queue is full."}
    error = from_body(ErrorReply.model_validate({**body, "from_a_newer_version": 1}).error)
    assert type(error) is QueueFull
    assert (error.message, error.param, error.details) == ("The work queue is full.", "model", {"limit": 10})
    assert ErrorReply(error=error.body()).model_dump() == body
