"""OpenAI's Responses endpoints over the bus in memory: events, the log, and every way to a response and from it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from schemas.errors import DeadlineExceeded, QueueFull
from schemas.generation import GenerateRequest
from schemas.output import ChoiceDelta, OutputChunk, ToolCallDelta
from schemas.responses import AskedResponse, ResponseObject, StoredResponse
from services.gateway.app import build_app
from services.gateway.response_log import BusResponseLog
from services.gateway.responses.log import folded
from services.gateway.service import BusPipeline
from services.gateway.settings import Settings
from services.runtime.bus import Bus
from services.runtime.metrics import Metrics
from services.runtime.registry import Registry
from services.runtime.request_meter import RequestMeter
from services.runtime.telemetry import Tracing
from tests.scripted_tokenizer import ScriptedTokenizer, Writer, call, endless, say
from tests.unit.gateway.test_gateway_messages import named_events

RESPONSES = "/v1/responses"
HELLO: dict[str, Any] = {"input": "Hello"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture
async def other(memory_bus: Bus, registry: Registry, tracing: Tracing) -> AsyncIterator[httpx.AsyncClient]:
    """A client of another gateway of the same deployment."""
    pipeline, log = BusPipeline(memory_bus, registry, "smol", 1.0), BusResponseLog(memory_bus, 1.0)
    app = build_app(pipeline, Settings(), tracing, "1.2.3", response_log=log)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://other") as client:
        yield client


def error_of(response: httpx.Response) -> tuple[int, str, Any]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def ended(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Poll a response until it has ended."""
    async with asyncio.timeout(10):
        while True:
            response: dict[str, Any] = (await client.get(path)).json()
            if response["status"] not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.01)


async def test_a_response_is_answered_whole_and_found_again_at_any_gateway(
    http: httpx.AsyncClient, other: httpx.AsyncClient
) -> None:
    body = {**HELLO, "instructions": "Be brief.", "metadata": {"team": "a"}, "max_output_tokens": 9}
    response = await http.post(RESPONSES, json=body)
    answer = ResponseObject.model_validate_json(response.content)
    [message] = response.json()["output"]
    assert (answer.status, message["status"], message["role"]) == ("completed", "completed", "assistant")
    assert [(part["type"], part["text"]) for part in message["content"]] == [("output_text", "alpha beta gamma")]
    assert (answer.usage or {})["total_tokens"] == 8
    assert response.json()["metadata"] == {"team": "a"}
    assert (await other.get(f"{RESPONSES}/{answer.id}")).json() == response.json()


async def test_events_come_in_order_with_numbers(http: httpx.AsyncClient) -> None:
    events = named_events((await http.post(RESPONSES, json={**HELLO, "stream": True})).text)
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert "".join(data["delta"] for name, data in events if name.endswith(".delta")) == "alpha beta gamma"
    whole = (await http.get(f"{RESPONSES}/{events[0][1]['response']['id']}")).json()
    assert events[-1][1]["response"] == whole
    assert events[2][1]["item"]["id"] == whole["output"][0]["id"] == events[4][1]["item_id"]


async def test_calls_are_items_of_their_own(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = call("add", '{"a": ', "1}", text="Well.")
    body = {**HELLO, "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}}
    events = named_events((await http.post(RESPONSES, json={**body, "stream": True})).text)
    text, made = events[-1][1]["response"]["output"]
    assert text["content"][0]["text"] == "Well."
    assert (made["type"], made["name"], made["call_id"], made["arguments"]) == (
        "function_call",
        "add",
        "call_1",
        '{"a": 1}',
    )
    names = [name.removeprefix("response.") for name, _ in events]
    assert names[-7:] == [
        "output_item.done",
        "output_item.added",
        *["function_call_arguments.delta"] * 2,
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    request = tokenizer.requests[0]
    assert request.tools is not None
    assert request.tools[0].function.strict
    assert (await http.post(RESPONSES, json=body)).json()["output"][1]["arguments"] == '{"a": 1}'


async def test_an_answer_that_was_cut_is_incomplete(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = say("alpha", "length")
    answer = (await http.post(RESPONSES, json=HELLO)).json()
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    events = named_events((await http.post(RESPONSES, json={**HELLO, "stream": True})).text)
    assert events[-1][0] == "response.incomplete"


async def test_an_empty_answer_is_an_empty_message(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    async def script(writer: Writer) -> None:
        await writer.write(ChoiceDelta(token_ids=(1,), finish_reason="stop"))
        await writer.end()

    tokenizer.script = script
    answer = (await http.post(RESPONSES, json=HELLO)).json()
    assert answer["output"][0]["content"][0]["text"] == ""


async def test_logprobs_are_included_on_request(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    body = {**HELLO, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = (await http.post(RESPONSES, json=body)).json()
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == "alpha beta gamma"
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2, 2, 2]
    assert tokenizer.requests[0].logprobs == 2


async def test_a_conversation_goes_on_from_a_response(
    http: httpx.AsyncClient, other: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = call("add", "{}", text="Well.")
    parts = [{"type": "input_text", "text": "Hello"}]
    first = {"input": [{"role": "developer", "content": parts}], "instructions": "Be brief.", "tools": [TOOL]}
    one = (await http.post(RESPONSES, json=first)).json()
    tokenizer.script = say("delta")
    result = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
    two = (await other.post(RESPONSES, json={"input": [result], "previous_response_id": one["id"]})).json()
    turns = [(turn.role, turn.content) for turn in tokenizer.requests[1].messages or ()]
    assert [role for role, _ in turns] == ["system", "assistant", "tool"]  # the instructions are not carried over
    assert (turns[1][1], turns[2][1]) == ("Well.", "2")
    assert (tokenizer.requests[1].messages or ())[1].tool_calls is not None
    listing = (await http.get(f"{RESPONSES}/{two['id']}/input_items", params={"order": "asc"})).json()
    assert [item["type"] for item in listing["data"]] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    page = (await http.get(f"{RESPONSES}/{two['id']}/input_items", params={"limit": 2})).json()
    assert (page["has_more"], page["first_id"]) == (True, listing["last_id"])
    rest = {"after": page["last_id"], "limit": "9"}
    rest_page = (await http.get(f"{RESPONSES}/{two['id']}/input_items", params=rest)).json()
    assert (len(rest_page["data"]), rest_page["has_more"]) == (2, False)
    three = await http.post(RESPONSES, json={"input": "On", "previous_response_id": two["id"]})
    assert three.status_code == 200
    assert len(tokenizer.requests[2].messages or ()) == 5


async def test_the_background_answers_at_once_and_is_polled(
    http: httpx.AsyncClient, other: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    go_on = asyncio.Event()

    async def script(writer: Writer) -> None:
        await go_on.wait()
        await writer.word("alpha")
        await writer.word(" beta", finish_reason="stop")
        await writer.end()

    tokenizer.script = script
    begun = (await http.post(RESPONSES, json={**HELLO, "background": True})).json()
    assert (begun["status"], begun["output"], begun["background"]) == ("queued", [], True)
    path = f"{RESPONSES}/{begun['id']}"
    early = await other.post(RESPONSES, json={"input": "On", "previous_response_id": begun["id"]})
    assert error_of(early) == (400, "invalid_parameter", "previous_response_id")
    go_on.set()
    done = await ended(other, path)
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "alpha beta")
    assert tokenizer.cancelled == []


async def test_the_background_is_measured_like_any_request(memory_bus: Bus, tokenizer: ScriptedTokenizer) -> None:
    meter = RequestMeter(Metrics())
    log = BusResponseLog(memory_bus, 1.0, meter)
    ask = GenerateRequest(model="smol", prompt="Hello")
    await log.submit(ask.model_copy(update={"request_id": "first"}))
    async with asyncio.timeout(10):
        while meter.open:
            await asyncio.sleep(0.01)
    counted = (meter.first_token, meter.whole, meter.num_generated, meter.num_prompt_tokens)
    assert [sum(histogram.counts) for histogram in counted] == [1, 1, 1, 1]
    assert meter.generation_tokens.value == 3
    assert meter.metrics.counter("request_success_total", "stop").value == 1

    tokenizer.refusal = QueueFull("full")
    with pytest.raises(QueueFull):
        await log.submit(ask.model_copy(update={"request_id": "second"}))
    assert meter.metrics.counter("request_errors_total", "queue_full").value == 1
    tokenizer.refusal = None

    tokenizer.script = endless
    await log.submit(ask.model_copy(update={"request_id": "third"}))
    assert meter.open
    await log.close()
    await asyncio.sleep(0)  # for what is called at the end of a task
    assert not meter.open
    assert sum(meter.whole.counts) == 1
    assert tokenizer.cancelled == []


async def test_a_background_stream_can_be_left_and_read_on_from_a_number(
    http: httpx.AsyncClient, other: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    body = {**HELLO, "background": True, "stream": True}
    events = named_events((await http.post(RESPONSES, json=body)).text)
    path = f"{RESPONSES}/{events[0][1]['response']['id']}"
    assert named_events((await other.get(path, params={"stream": "true"})).text) == events
    behind = {"stream": "true", "starting_after": "4"}
    assert named_events((await other.get(path, params=behind)).text) == events[5:]
    assert tokenizer.cancelled == []
    wrong = {"stream": "true", "starting_after": "x"}
    assert error_of(await other.get(path, params=wrong)) == (400, "invalid_parameter", "starting_after")


async def test_a_running_response_is_followed_to_its_end(
    http: httpx.AsyncClient, other: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    go_on = asyncio.Event()

    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await go_on.wait()
        await writer.word(" beta", finish_reason="stop")
        await writer.end()

    tokenizer.script = script
    begun = (await http.post(RESPONSES, json={**HELLO, "background": True})).json()
    following = asyncio.create_task(other.get(f"{RESPONSES}/{begun['id']}", params={"stream": "true"}))
    await asyncio.sleep(0.05)
    go_on.set()
    events = named_events((await asyncio.wait_for(following, 10)).text)
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "alpha beta"


async def test_a_response_is_cancelled_at_any_gateway(
    http: httpx.AsyncClient, other: httpx.AsyncClient, tokenizer: ScriptedTokenizer, eventually: Any
) -> None:
    tokenizer.script = endless
    begun = (await http.post(RESPONSES, json={**HELLO, "background": True})).json()
    await eventually(lambda: tokenizer.requests and next(iter(tokenizer.writers.values())).num_written)
    cancelled = (await other.post(f"{RESPONSES}/{begun['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["output"][0]["status"]) == ("cancelled", "incomplete")
    again = (await http.post(f"{RESPONSES}/{begun['id']}/cancel")).json()
    assert again == cancelled
    followed = named_events((await http.get(f"{RESPONSES}/{begun['id']}", params={"stream": "true"})).text)
    assert (followed[-1][0], followed[-1][1]["response"]["status"]) == ("response.failed", "cancelled")


async def test_a_finished_response_stays_as_it_is_when_cancelled(http: httpx.AsyncClient) -> None:
    answer = (await http.post(RESPONSES, json=HELLO)).json()
    assert (await http.post(f"{RESPONSES}/{answer['id']}/cancel")).json() == answer


async def test_what_was_deleted_or_never_stored_is_not_found(http: httpx.AsyncClient, other: httpx.AsyncClient) -> None:
    kept = (await http.post(RESPONSES, json={**HELLO, "request_id": "mine"})).json()
    assert kept["id"] == "resp_mine"
    deleted = (await other.delete(f"{RESPONSES}/{kept['id']}")).json()
    assert deleted == {"id": "resp_mine", "object": "response", "deleted": True}
    fleeting = (await http.post(RESPONSES, json={**HELLO, "store": False})).json()
    for name in ("resp_mine", fleeting["id"], "resp_none", "mine", "resp_"):
        for answer in (
            await http.get(f"{RESPONSES}/{name}"),
            await http.post(f"{RESPONSES}/{name}/cancel"),
            await http.delete(f"{RESPONSES}/{name}"),
            await http.get(f"{RESPONSES}/{name}/input_items"),
        ):
            assert error_of(answer) == (404, "output_not_found", None)
        previous = await http.post(RESPONSES, json={**HELLO, "previous_response_id": name})
        assert error_of(previous) == (404, "output_not_found", "previous_response_id")
    again = (await http.post(RESPONSES, json={**HELLO, "request_id": "mine"})).json()
    assert (await http.get(f"{RESPONSES}/{again['id']}")).status_code == 404  # an id is used once


async def test_a_response_whose_output_was_dropped_is_not_found() -> None:
    record = StoredResponse(
        request_id="r", model="smol", created_s=1.0, num_prompt_tokens=1, body=AskedResponse(input="x")
    )
    late = OutputChunk(
        request_id="r", model="smol", created_s=1.0, epoch=1, choices=(ChoiceDelta(start=3, token_ids=(1,)),)
    )
    assert folded(record, [late]) is None
    assert folded(record, []) is not None


async def test_a_failure_ends_the_stream_as_a_failed_response(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    async def script(writer: Writer) -> None:
        await writer.word("alpha")
        await writer.fail(DeadlineExceeded("Too late."))

    tokenizer.script = script
    name, data = named_events((await http.post(RESPONSES, json={**HELLO, "stream": True})).text)[-1]
    assert (name, data["response"]["status"]) == ("response.failed", "failed")
    assert (data["response"]["error"]["code"], data["response"]["error"]["type"]) == (
        "server_error",
        "deadline_exceeded",
    )
    whole = await http.post(RESPONSES, json=HELLO)
    assert error_of(whole) == (504, "deadline_exceeded", None)
    begun = (await http.post(RESPONSES, json={**HELLO, "background": True})).json()
    assert (await ended(http, f"{RESPONSES}/{begun['id']}"))["status"] == "failed"


async def test_a_full_queue_is_a_503_in_the_background_too(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.refusal = QueueFull("Full.")
    for background in (False, True):
        response = await http.post(RESPONSES, json={**HELLO, "background": background})
        assert error_of(response) == (503, "queue_full", None)
        assert response.headers["retry-after"] == "1"


async def test_a_stream_goes_on_behind_an_event(http: httpx.AsyncClient, other: httpx.AsyncClient) -> None:
    body = {**HELLO, "stream": True}
    whole = (await http.post(RESPONSES, json=body)).text
    ids = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
    rest = (await other.post(RESPONSES, json=body, headers={"Last-Event-ID": ids[1]})).text
    assert rest == whole[whole.index(ids[1]) :].partition("\n\n")[2]


async def test_a_client_that_leaves_cancels_what_is_not_in_the_background(
    serve: Any, tokenizer: ScriptedTokenizer, eventually: Any
) -> None:
    tokenizer.script = endless
    async with serve() as (_, url):
        async with (
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", RESPONSES, json={**HELLO, "stream": True}) as response,
        ):
            async for piece in response.aiter_text():
                if "delta" in piece:
                    break
        await eventually(lambda: tokenizer.cancelled, 3.0)


async def test_two_calls_may_follow_each_other(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    async def script(writer: Writer) -> None:
        for index in (0, 1):
            begun = ToolCallDelta(index=index, id=f"call_{index}", name="add", arguments="{}")
            await writer.write(ChoiceDelta(token_ids=(1,), tool_calls=(begun,)))
        await writer.write(ChoiceDelta(finish_reason="tool_calls"))
        await writer.end()

    tokenizer.script = script
    answer = (await http.post(RESPONSES, json={**HELLO, "tools": [TOOL]})).json()
    assert [(item["call_id"], item["arguments"], item["status"]) for item in answer["output"]] == [
        ("call_0", "{}", "completed"),
        ("call_1", "{}", "completed"),
    ]


async def test_only_allowed_tools_are_shown(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]}
    body = {**HELLO, "tools": [TOOL, {**TOOL, "name": "sub"}], "tool_choice": choice, "parallel_tool_calls": False}
    assert (await http.post(RESPONSES, json=body)).status_code == 200
    request = tokenizer.requests[0]
    assert [tool.function.name for tool in request.tools or ()] == ["sub"]
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)


@pytest.mark.parametrize(
    ("format_", "sent"),
    [
        ({"type": "text"}, {"type": "text"}),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True}},
        ),
    ],
)
async def test_a_text_format_becomes_a_response_format(
    http: httpx.AsyncClient, tokenizer: ScriptedTokenizer, format_: dict[str, Any], sent: dict[str, Any]
) -> None:
    assert (await http.post(RESPONSES, json={**HELLO, "text": {"format": format_}})).status_code == 200
    assert tokenizer.requests[0].response_format == sent


IMAGE = {"type": "input_image", "image_url": "http://x"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": [IMAGE]}]}, "input.0.output.0"),
        ({"input": [{"type": "reasoning", "id": "1", "summary": []}]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0"),
        ({"input": [{"type": {}, "role": "user", "content": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [7]}]}, "input.0.content.0"),
        ({"input": [7]}, "input.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"n": 3}, "n"),
        ({"min_p": 7}, "min_p"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    http: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    status, _, field = error_of(await http.post(RESPONSES, json={**HELLO, **change}))
    assert (status, (field or "")[: len(param)]) == (400, param)


async def test_what_asks_for_nothing_is_accepted(http: httpx.AsyncClient, tokenizer: ScriptedTokenizer) -> None:
    neutral = {
        "reasoning": {"effort": None},
        "truncation": "disabled",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "stream_options": {"include_obfuscation": False},
        "conversation": None,
        "n": 1,
    }
    assert (await http.post(RESPONSES, json={**HELLO, **neutral, "seed": 7})).status_code == 200
    assert tokenizer.requests[0].seed == 7
