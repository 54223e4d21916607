"""The endpoints over the bus in memory: answers, errors in OpenAI's shape, request ids, spans, logs."""

import logging
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.control import ExecutorCapacity
from schemas.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidParameter,
    NatterjackError,
    QueueFull,
)
from schemas.openai import ChatCompletion, ChatCompletionChunk, Completion, ModelList
from services.runtime.bus import Bus
from tests.scripted_tokenizer import ScriptedTokenizer, Writer, echo, silence
from tests.unit.gateway.gateway_traffic import CHAT, COMPLETIONS, HELLO, events, register, registration


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, checked to have OpenAI's four fields."""
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


async def test_a_chat_completion_is_answered_whole(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    response = await http.post(CHAT, json=HELLO)
    assert response.status_code == 200
    answer = ChatCompletion.model_validate_json(response.content)
    assert answer.choices[0].message.content == "alpha beta gamma"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert answer.model == "smol"
    assert answer.id == f"chatcmpl-{tokenizer.requests[0].request_id}"


async def test_a_streamed_chat_completion_says_the_same(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={**HELLO, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *objects, done = events(response.text)
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(one) for one in objects]
    assert len({(one.id, one.created, one.model) for one in chunks}) == 1
    assert "".join(c.delta.content or "" for one in chunks for c in one.choices) == "alpha beta gamma"
    assert [c.finish_reason for one in chunks for c in one.choices if c.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_answered_side_by_side(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer, stream: bool
) -> None:
    tokenizer.script = echo
    body = {"prompt": ["one", "two words", "three"], "n": 2, "stream": stream}
    response = await http.post(COMPLETIONS, json=body)
    objects = events(response.text)[:-1] if stream else [response.json()]
    texts = [""] * 6
    for one in objects:
        for choice in Completion.model_validate(one).choices:
            texts[choice.index] += choice.text
    assert texts == ["one", "one", "two words", "two words", "three", "three"]
    assert len(tokenizer.requests) == 3


async def test_one_refused_prompt_refuses_the_request_and_cancels_the_others(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer, eventually: Any
) -> None:
    tokenizer.script = silence
    accept = tokenizer._accept

    async def refuse_second(incoming: Any) -> Any:
        if incoming.message.prompt == "b":
            raise QueueFull("Too many.")
        return await accept(incoming)

    for served in tokenizer._served:
        await served.close()
    tokenizer._accept = refuse_second  # type: ignore[method-assign]
    await tokenizer.__aenter__()
    response = await http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
    assert response.status_code == 503
    await eventually(lambda: len(tokenizer.cancelled) >= len(tokenizer.requests))


async def test_an_error_after_acceptance_of_one_of_several_prompts_fails_the_request(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    async def script(writer: Writer) -> None:
        if writer.request.prompt == "b":
            await writer.fail(DeadlineExceeded("Too late."))

    tokenizer.script = script
    response = await http.post(COMPLETIONS, json={"prompt": ["a", "b"]})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")


async def test_logprobs_in_both_shapes(http: httpx.AsyncClient) -> None:
    chat = await http.post(CHAT, json={**HELLO, "logprobs": True, "top_logprobs": 2})
    content = ChatCompletion.model_validate_json(chat.content).choices[0].logprobs
    assert content is not None
    assert b"".join(bytes(token.bytes) for token in content.content) == b"alpha beta gamma"
    assert all(len(token.top_logprobs) == 2 for token in content.content)
    completion = await http.post(COMPLETIONS, json={"prompt": "x", "logprobs": 1})
    lists = Completion.model_validate_json(completion.content).choices[0].logprobs
    assert lists is not None
    assert lists.text_offset == [0, 5, 10]


# ---- errors


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"{}", "messages"),
        (b'{"messages": 5}', "messages"),
        (b'{"messages": [], "max_tokens": "5"}', "max_tokens"),
        (b'{"messages": [], "stream_options": {}}', "stream_options"),
        (b'{"messages": [], "n": 2, "temperature": 0}', "n"),
        (b'{"messages": [], "suffix": "x"}', "suffix"),
        (b'{"messages": [], "functions": []}', "functions"),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_field(
    http: httpx.AsyncClient, body: bytes, param: str | None
) -> None:
    response = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_another_content_type_is_a_415(http: httpx.AsyncClient, content_type: str) -> None:
    response = await http.post(CHAT, content=b"{}", headers={"content-type": content_type})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")


async def test_a_content_type_with_a_charset_is_json(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = await http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_a_large_body_is_a_413(http: httpx.AsyncClient, announced: bool) -> None:
    size = (64 << 10) + 1

    async def pieces() -> Any:
        yield b"x" * size

    headers = {"content-type": "application/json"}
    response = await http.post(CHAT, content=b"x" * size if announced else pieces(), headers=headers)
    assert (response.status_code, error_of(response)["code"]) == (413, "payload_too_large")


async def test_an_absurd_content_length_is_a_413(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-length": "9" * 5000}
    assert (await http.post(CHAT, content=b"{}", headers=headers)).status_code == 413


@pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v1/chat/completions/"])
async def test_an_unknown_path_is_a_404(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path, follow_redirects=False)
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_path")


async def test_a_wrong_method_is_a_405(http: httpx.AsyncClient) -> None:
    response = await http.get(CHAT)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_a_404(http: httpx.AsyncClient, stream: bool) -> None:
    response = await http.post(CHAT, json={**HELLO, "model": "gpt-9", "stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert error_of(response)["param"] == "model"


async def test_a_known_model_that_nobody_serves_just_now_is_a_503(http: httpx.AsyncClient, memory_bus: Bus) -> None:
    await register(memory_bus, [registration("tokenizer", "tokenizer-9", model="other")])
    response = await http.post(CHAT, json={**HELLO, "model": "other"})
    assert (response.status_code, error_of(response)["code"]) == (503, "service_unavailable")
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "retries"),
    [
        (InvalidParameter("No.", param="stop"), 400, False),
        (ContextLengthExceeded("Too long.", max_model_len=10, num_prompt_tokens=20), 400, False),
        (QueueFull("Too many."), 503, True),
        (DeadlineExceeded("Too late."), 504, False),
        (InternalError("It broke."), 500, False),
    ],
)
async def test_a_refusal_has_its_own_status_streamed_or_not(
    http: httpx.AsyncClient,
    tokenizer: ScriptedTokenizer,
    refusal: NatterjackError,
    status: int,
    retries: bool,
    stream: bool,
) -> None:
    tokenizer.refusal = refusal
    response = await http.post(CHAT, json={**HELLO, "stream": stream})
    assert response.status_code == status
    error = error_of(response)
    assert (error["code"], error["param"], error["message"]) == (refusal.code, refusal.param, refusal.message)
    assert error.get("details", {}) == refusal.details
    assert ("retry-after" in response.headers) == retries


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_chunk_still_has_its_own_status(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer, stream: bool
) -> None:
    tokenizer.script = lambda writer: writer.fail(DeadlineExceeded("Too late."))
    response = await http.post(CHAT, json={**HELLO, "stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")


async def test_an_error_within_a_stream_is_an_event_and_then_done(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await writer.fail(InternalError("It broke."))

    tokenizer.script = script
    response = await http.post(CHAT, json={**HELLO, "stream": True})
    assert response.status_code == 200
    *_, text, error, done = events(response.text)
    assert text["choices"][0]["delta"]["content"] == "alpha"
    assert error["error"]["code"] == "internal_error"
    assert done == "[DONE]"


async def test_an_error_within_a_whole_answer_is_its_status(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await writer.fail(InternalError("It broke."))

    tokenizer.script = script
    response = await http.post(CHAT, json=HELLO)
    assert (response.status_code, error_of(response)["message"]) == (500, "It broke.")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_logged_once_and_not_shown(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr("services.gateway.service.generate", fail)
    response = await http.post(CHAT, json={**HELLO, "stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


async def test_a_bug_within_a_stream_is_an_event_logged_once_and_not_shown(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from services.gateway.frames import EventFrames

    chunk = EventFrames.chunk

    def fail_second(self: EventFrames, prompt: int, one: Any) -> bytes:
        if one.choices[0].start:
            raise RuntimeError("secret")
        return chunk(self, prompt, one)

    monkeypatch.setattr(EventFrames, "chunk", fail_second)
    response = await http.post(CHAT, json={**HELLO, "stream": True})
    *_, error, done = events(response.text)
    assert error["error"]["code"] == "internal_error"
    assert done == "[DONE]"
    assert "secret" not in response.text
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


# ---- models, health, documentation


async def test_models_are_listed_with_their_context_length(http: httpx.AsyncClient, memory_bus: Bus) -> None:
    capacity = ExecutorCapacity(
        engine="echo",
        model_file="",
        device="cpu",
        kernels="",
        vocab_size=10,
        max_model_len=8192,
        block_size=16,
        num_blocks=10,
    )
    entry = registration("executor", "executor-1", model="org/model.v2", capacity=capacity, started_s=17.0)
    await register(memory_bus, [entry])
    models = ModelList.model_validate_json((await http.get("/v1/models")).content)
    assert {model.id: model.max_model_len for model in models.data} == {"smol": None, "org/model.v2": 8192}
    one = (await http.get("/v1/models/org/model.v2")).json()
    assert (one["id"], one["created"], one["object"]) == ("org/model.v2", 17, "model")
    missing = await http.get("/v1/models/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


async def test_ready_names_what_is_missing_while_health_lives(http: httpx.AsyncClient, memory_bus: Bus) -> None:
    assert (await http.get("/ready")).json() == {"status": "ready"}
    await register(memory_bus, [registration("scheduler", state="draining")])
    response = await http.get("/ready")
    assert response.status_code == 503
    assert "scheduler" in error_of(response)["message"]
    assert error_of(response)["details"]["missing"] == ["scheduler"]
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/version")).json() == {"version": "1.2.3"}


async def test_the_document_describes_request_bodies_and_has_no_422(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    for path, name in ((CHAT, "ChatCompletionRequest"), (COMPLETIONS, "CompletionRequest")):
        operation = document["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(name)
        properties = document["components"]["schemas"][name]["properties"]
        assert {"temperature", "stream_options", "max_tokens", "logprobs", "top_k"} <= set(properties)
        assert "deliver" not in properties
    text = (await http.get("/openapi.json")).text
    names = set(document["components"]["schemas"])
    assert all(part.split('"')[0] in names for part in text.split("#/components/schemas/")[1:])
    posted = [
        operation for path in document["paths"].values() for operation in path.values() if "requestBody" in operation
    ]
    assert all("422" not in operation["responses"] for operation in posted)
    assert (await http.get("/docs")).status_code == 200


# ---- ids, spans, logs


async def test_a_request_id_comes_back(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    response = await http.post(CHAT, json=HELLO)
    assert response.headers["x-request-id"] == tokenizer.requests[0].request_id
    given = await http.post(CHAT, json={**HELLO, "stream": True}, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert tokenizer.requests[1].request_id != "mine-1"
    odd = await http.get("/nothing", headers={"x-request-id": "a b\tc"})
    assert odd.headers["x-request-id"] not in ("a b\tc", "")


async def test_a_request_is_a_server_span_within_the_clients_trace(
    http: httpx.AsyncClient, span_exporter: InMemorySpanExporter
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    await http.post(CHAT, json={**HELLO, "stream": True, "temperature": 0.5, "max_tokens": 9}, headers=headers)
    await http.get("/health", headers=headers)
    spans = {span.name: span for span in span_exporter.get_finished_spans()}
    server = spans[f"POST {CHAT}"]
    assert f"{server.context.trace_id:032x}" == trace_id
    assert server.attributes["gen_ai.request.temperature"] == 0.5
    assert server.attributes["gen_ai.request.max_tokens"] == 9
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["gen_ai.usage.input_tokens"] == 5
    assert server.attributes["gen_ai.usage.output_tokens"] == 3
    request = spans["request generate_request"]
    assert request.parent.span_id == server.context.span_id
    assert not any("/health" in name for name in spans)


async def test_a_failed_request_is_a_failed_span(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer, span_exporter: InMemorySpanExporter
) -> None:
    tokenizer.refusal = InternalError("It broke.")
    await http.post(CHAT, json=HELLO)
    server = {span.name: span for span in span_exporter.get_finished_spans()}[f"POST {CHAT}"]
    assert not server.status.is_ok
    assert server.attributes["error.type"] == "500"


async def test_a_malformed_traceparent_is_ignored(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=HELLO, headers={"traceparent": "nonsense"})
    assert response.status_code == 200


async def test_a_request_is_one_log_line_and_a_path_cannot_forge_another(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.gateway")
    await http.get("/a%0Ab")
    await http.get("/health")
    (record,) = [record for record in caplog.records if record.name == "services.gateway.exchange"]
    assert record.getMessage().startswith("GET /a%0Ab 404 ")
