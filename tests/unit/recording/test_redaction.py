"""No text, or neither text nor ids, is left; what is left still has its shape."""

import json

import orjson
import pytest

from schemas.errors import ErrorBody
from schemas.generation import ChatMessage, GenerateRequest, WorkItem
from schemas.output import ChoiceDelta, OutputChunk, TokenText
from services.recording.capture_file import Captured
from services.recording.message_kinds import message_of
from services.recording.redaction import redact
from tests.unit.recording.captured_traffic import inner_path, one_request

SECRET = "hunter2"


def body_of(message):
    return orjson.loads(message.model_dump_json())


def test_no_text_is_left_and_ids_stay():
    request = GenerateRequest(
        model="smol",
        messages=(ChatMessage.model_validate({"role": "user", "content": SECRET, "name": SECRET, "x": SECRET}),),
        stop=(SECRET,),
        guided_json={SECRET: 1},
    )
    left = redact("generate_request/1", body_of(request), "text")
    assert SECRET not in json.dumps(left)
    assert left["messages"][0]["role"] == "user"
    assert left["model"] == "smol"


@pytest.mark.parametrize("redaction", ["text", "ids"])
def test_every_message_of_the_path_loses_its_text_and_is_still_read(redaction):
    for captured in [*one_request(prompt=SECRET, text=SECRET, stop=(SECRET,)), *inner_path()]:
        left = redact(captured.schema, captured.body, redaction)
        assert SECRET not in json.dumps(left)
        if captured.schema in ("work_item/1", "output_chunk/1"):
            kind = {"work_item/1": WorkItem, "output_chunk/1": OutputChunk}[captured.schema]
            assert message_of(Captured(0.0, "s", left, schema=captured.schema), kind) is not None


def test_token_ids_stay_or_go():
    chunk = OutputChunk(
        request_id="r",
        model="smol",
        created_s=1.0,
        epoch=1,
        choices=(
            ChoiceDelta(
                token_ids=(5, 6),
                text=SECRET,
                stop_reason=SECRET,
                logprobs=(TokenText(token_id=5, token=SECRET, token_bytes=(1,), logprob=-0.5),),
            ),
        ),
        error=ErrorBody(message=SECRET, type="server_error", code="internal_error"),
    )
    with_ids, without = (redact("output_chunk/1", body_of(chunk), kind) for kind in ("text", "ids"))
    assert SECRET not in json.dumps(with_ids) + json.dumps(without)
    assert with_ids["choices"][0]["token_ids"] == [5, 6]
    assert without["choices"][0]["token_ids"] == [0, 0]
    assert with_ids["choices"][0]["logprobs"][0]["token_bytes"] == []
    assert without["choices"][0]["logprobs"][0]["logprob"] == -0.5
    assert with_ids["error"]["code"] == "internal_error"


def test_what_nobody_knows_is_dropped_and_operational_messages_stay():
    assert redact("invented/1", {"prompt": SECRET}, "text") is None
    assert redact(None, {"prompt": SECRET}, "text") is None
    assert redact("generate_request/1", SECRET, "text") is None
    registration = {"instance": "executor-0", "detail": "loading"}
    assert redact("registration/1", registration, "ids") == registration
    assert redact("work_item/1", {"x": SECRET}, "none") == {"x": SECRET}
