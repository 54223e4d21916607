"""Anthropic's endpoints over the bus in memory: translation, events, errors in their own shape, resumption."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from schemas.anthropic import AnthropicError, AnthropicMessage
from schemas.errors import DeadlineExceeded, NatterjackError, QueueFull, Unavailable
from schemas.output import ChoiceDelta
from schemas.tokenization import TokenizeReply, TokenizeRequest
from services.runtime.bus import Bus, Incoming
from tests.scripted_tokenizer import ScriptedTokenizer, Writer, call, say
from tests.unit.gateway.gateway_traffic import Served

MESSAGES = "/v1/messages"
HELLO: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def named_events(text: str) -> list[tuple[str, Any]]:
    """The events of a stream with their names, which are their types."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "data" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    assert all(name == data["type"] for name, data in found)
    return found


def error_of(response: httpx.Response) -> tuple[str, str, Any]:
    """Type, message and field of an error, checked to have Anthropic's shape."""
    error = AnthropicError.model_validate_json(response.content)
    assert error.request_id == response.headers["request-id"] == response.headers["x-request-id"]
    return error.error.type, error.error.message, error.error.details["param"]


async def test_a_message_is_answered_whole(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    response = await http.post(MESSAGES, json=HELLO, headers={"anthropic-version": "2023-06-01"})
    message = AnthropicMessage.model_validate_json(response.content)
    assert [block.model_dump() for block in message.content] == [{"type": "text", "text": "alpha beta gamma"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 3)
    assert message.id == f"msg_{tokenizer.requests[0].request_id}"
    assert tokenizer.requests[0].max_tokens == 9


async def test_a_streamed_message_says_the_same_in_order(http: httpx.AsyncClient) -> None:
    response = await http.post(MESSAGES, json={**HELLO, "stream": True})
    events = named_events(response.text)
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert "".join(deltas) == "alpha beta gamma"
    assert events[0][1]["message"]["content"] == []
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 3


async def test_text_and_a_call_are_blocks_of_their_own(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = call("add", '{"a": ', "1}", text="Well.")
    body = {**HELLO, "tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = (await http.post(MESSAGES, json=body)).json()
    assert whole["content"] == [
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
    ]
    assert whole["stop_reason"] == "tool_use"
    request = tokenizer.requests[0]
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)
    assert request.tools is not None
    assert request.tools[0].function.parameters == {"type": "object"}
    events = named_events((await http.post(MESSAGES, json={**body, "stream": True})).text)
    blocks = [(data["index"], data["content_block"]["type"]) for name, data in events if name == "content_block_start"]
    assert blocks == [(0, "text"), (1, "tool_use")]
    pieces = [data["delta"]["partial_json"] for _, data in events if data.get("delta", {}).get("partial_json")]
    assert pieces == ['{"a": ', "1}"]


async def test_arguments_that_the_length_cut_are_what_can_be_read(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = call("add", '{"a": 1, "b": [2, ')
    whole = (await http.post(MESSAGES, json={**HELLO, "tools": [TOOL]})).json()
    assert whole["content"][0]["input"] == {"a": 1, "b": [2]}


async def test_a_conversation_with_tools_becomes_turns(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Add", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on"}]},
    ]
    body = {**HELLO, "system": [{"type": "text", "text": "Be brief."}], "messages": turns, "tools": [TOOL]}
    assert (await http.post(MESSAGES, json=body)).status_code == 200
    sent = [message.model_dump(exclude_none=True, mode="json") for message in tokenizer.requests[0].messages or ()]
    assert [turn["role"] for turn in sent] == ["system", "user", "assistant", "tool", "user"]
    assert sent[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (sent[3]["tool_call_id"], sent[3]["content"][0]["text"]) == ("t1", "2")


async def test_a_last_turn_of_the_assistant_is_continued(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    turns = [*HELLO["messages"], {"role": "assistant", "content": "It is"}]
    assert (await http.post(MESSAGES, json={**HELLO, "messages": turns})).status_code == 200
    request = tokenizer.requests[0]
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)


async def test_a_stop_sequence_is_named(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    async def script(writer: Writer) -> None:
        await writer.write(ChoiceDelta(token_ids=(1,), text="alpha", finish_reason="stop", stop_reason="END"))
        await writer.end()

    tokenizer.script = script
    options = {"stop_sequences": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5}
    whole = (await http.post(MESSAGES, json={**HELLO, **options})).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    request = tokenizer.requests[0]
    assert (request.stop, request.temperature, request.top_p, request.top_k) == (("END",), 0.5, 0.9, 5)


async def test_the_length_is_a_reason_to_stop(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = say("alpha", "length")
    assert (await http.post(MESSAGES, json=HELLO)).json()["stop_reason"] == "max_tokens"


RESULT = {"type": "tool_result", "tool_use_id": "1"}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages.0.content.0"),
        ({"system": [{"type": []}]}, "system.0.type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}]},
            "messages.0.content.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (
            {"messages": [{"role": "assistant", "content": [USE]}]},
            "messages",
        ),
        ({"system": [IMAGE]}, "system.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    http: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    response = await http.post(MESSAGES, json={**HELLO, **change})
    assert response.status_code == 400, response.text
    kind, _, field = error_of(response)
    assert (kind, field) == ("invalid_request_error", param)


async def test_what_asks_for_nothing_is_accepted(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    neutral = {"thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "service_tier": "auto", "tools": []}
    extension = {"seed": 7, "tool_choice": {"type": "auto"}, "output_config": {}}
    assert (await http.post(MESSAGES, json={**HELLO, **neutral, **extension})).status_code == 200
    assert tokenizer.requests[0].seed == 7


async def test_an_output_format_becomes_a_schema(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
    assert (await http.post(MESSAGES, json={**HELLO, "output_config": config})).status_code == 200
    response_format = tokenizer.requests[0].response_format or {}
    assert response_format["json_schema"] == {"name": "output", "schema": {"type": "integer"}}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("Full."), 529, "overloaded_error"),
        (Unavailable("Away."), 503, "overloaded_error"),
        (DeadlineExceeded("Late."), 504, "timeout_error"),
    ],
)
async def test_refusals_have_the_status_that_its_clients_know(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer, error: NatterjackError, status: int, kind: str
) -> None:
    tokenizer.refusal = error
    response = await http.post(MESSAGES, json=HELLO)
    assert (response.status_code, error_of(response)[0]) == (status, kind)
    assert ("retry-after" in response.headers) == error.retryable


async def test_every_error_of_the_path_has_its_shape(http: httpx.AsyncClient, serve: Served) -> None:
    json_type = {"content-type": "application/json"}
    answers = [
        (await http.post(MESSAGES, json={**HELLO, "model": "other"}), 404, "not_found_error"),
        (await http.post(MESSAGES, content="x"), 415, "invalid_request_error"),
        (await http.post(MESSAGES, content="x", headers=json_type), 400, "invalid_request_error"),
        (await http.get(MESSAGES), 405, "invalid_request_error"),
        (await http.post(f"{MESSAGES}/batches", json={}), 404, "not_found_error"),
        (await http.post(MESSAGES, content=b" " * (65 << 10), headers=json_type), 413, "request_too_large"),
    ]
    async with serve(api_keys="secret") as (_, url), httpx.AsyncClient(base_url=url) as client:
        answers.append((await client.post(MESSAGES, json=HELLO), 401, "authentication_error"))
        assert (await client.post(MESSAGES, json=HELLO, headers={"x-api-key": "secret"})).status_code == 200
    for response, status, kind in answers:
        assert (response.status_code, error_of(response)[0]) == (status, kind)


async def test_a_stream_that_fails_ends_with_an_error_event(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await writer.fail(DeadlineExceeded("Too late."))

    tokenizer.script = script
    name, data = named_events((await http.post(MESSAGES, json={**HELLO, "stream": True})).text)[-1]
    assert (name, data["error"]["type"], data["error"]["message"]) == ("error", "timeout_error", "Too late.")


async def test_a_stream_goes_on_behind_an_event(http: httpx.AsyncClient) -> None:
    body = {**HELLO, "stream": True}
    whole = (await http.post(MESSAGES, json=body)).text
    ids = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
    rest = (await http.post(MESSAGES, json=body, headers={"Last-Event-ID": ids[0]})).text
    assert rest == whole[whole.index(ids[0]) :].partition("\n\n")[2]


async def test_a_silent_stream_is_pinged(serve: Served, tokenizer: ScriptedTokenizer) -> None:
    go_on = asyncio.Event()

    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await go_on.wait()
        await writer.end()

    tokenizer.script = script
    async with (
        serve(keepalive_s=0.02) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=20) as client,
        client.stream("POST", MESSAGES, json={**HELLO, "stream": True}) as response,
    ):
        text = ""
        async for piece in response.aiter_text():
            text += piece
            if text.count("event: ping") > 2:
                go_on.set()
    assert named_events(text)[-1][0] == "message_stop"


async def test_tokens_are_counted_as_an_answers_prompt(
    http: httpx.AsyncClient, memory_bus: Bus, tokenizer: ScriptedTokenizer
) -> None:
    asked: list[TokenizeRequest] = []

    async def count(incoming: Incoming[TokenizeRequest]) -> TokenizeReply:
        asked.append(incoming.message)
        return TokenizeReply(count=17, max_model_len=100)

    server = await memory_bus.serve(memory_bus.subjects.tokenize("smol"), TokenizeRequest, count)
    tools = [TOOL, {**TOOL, "name": "sub"}]
    body = {"messages": HELLO["messages"], "system": "Be brief.", "tools": tools}
    for choice, names in (
        ({"type": "auto"}, ["add", "sub"]),
        ({"type": "tool", "name": "sub"}, ["sub"]),
        ({"type": "none"}, []),
    ):
        response = await http.post(f"{MESSAGES}/count_tokens", json={**body, "tool_choice": choice})
        assert response.json() == {"input_tokens": 17}
        assert [tool.function.name for tool in asked[-1].tools or ()] == names
    assert [message.role for message in asked[0].messages or ()] == ["system", "user"]
    await server.close()
