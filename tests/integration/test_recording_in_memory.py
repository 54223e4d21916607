"""Recording, replay and explanation against the real services over the bus in memory."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from schemas.codec import SCHEMA_HEADER
from schemas.generation import ChatMessage, GenerateRequest
from services.cli.replay_run import compare_recordings, rules_of
from services.executor.choosing import Choosing
from services.recording import recorder, replaying, wiretap
from services.recording.capture_file import Capture, CaptureError, Note
from services.recording.comparison import CONTEXT, compare
from services.recording.explanation import as_text, narrate
from services.recording.filters import parse_filters
from services.recording.outcomes import read_outcomes
from services.recording.pairing import REPLAYED
from services.recording.replay_plan import plan_replay
from services.recording.replaying import Replay
from services.recording.schedule import read_schedule
from services.recording.session import Wish, record_from_streams, recording
from services.runtime import generation
from services.runtime.telemetry import Tracing
from services.scheduler import service as scheduler_service
from services.scheduler.requests import Sequence
from services.tokenizer import validation
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.validation import Validator
from tests.integration.services_in_memory import Deployment, ask, deployed
from tests.integration.varied_traffic import send_everything

NUM_REQUESTS = 40
SHORT = {"model": {"source": "builtin:bytes", "max_model_len": 256}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_service, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(generation, "POLL_S", 0.2)
    monkeypatch.setattr(generation, "CANCEL_PERIOD_S", 0.05)
    monkeypatch.setattr(recorder, "FLUSH_PERIOD_S", 0.1)


@pytest.fixture
async def deployment(tracing: Tracing) -> AsyncIterator[Deployment]:
    async with deployed(tracing) as deployment:
        yield deployment


async def record(deployment: Deployment, path: Path, *filters: str, redaction: str = "none", traffic=None) -> dict:
    bus = deployment.bus()
    async with recording(bus, Wish(path, parse_filters(filters), redaction)) as session:
        await (traffic or send_everything(deployment.bus(), chat=False, num_requests=NUM_REQUESTS))
        await asyncio.sleep(0.1)
    return session.closing


async def replay(deployment: Deployment, path: Path, *, speed: float | None = None, output: Path | None = None):
    capture = Capture(path)
    outcomes = read_outcomes(capture.messages())
    plan = plan_replay(outcomes, capture.header.redaction, os.urandom(4).hex())
    run = Replay(deployment.bus(), speed=speed, max_concurrent=8, limit_s=60.0)
    if output is None:
        await run.run(plan.requests)
    else:
        async with recording(deployment.bus(), Wish(output)) as session:
            await run.run(
                plan.requests,
                lambda a: session.recorder.note(REPLAYED, {"original": a.original, "request_id": a.request_id}),
            )
            await asyncio.sleep(0.1)
    return compare(outcomes, run.outcomes, rules_of(capture, latency=None), plan.skipped)


async def test_varied_traffic_replays_equal_at_original_and_maximum_speed(deployment, tmp_path):
    path, again = tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl.zst"
    closing = await record(deployment, path)
    assert closing["num_requests_ended"] == NUM_REQUESTS
    assert (closing["num_dropped"], closing["num_missing"], closing["num_reconnects"]) == ({}, {}, 0)
    for speed, output in ((None, again), (1.0, None)):
        result = await replay(deployment, path, speed=speed, output=output)
        assert result.differences == []
        assert (result.num_compared, result.skipped) == (NUM_REQUESTS, {})
        assert len(result.timed) == 2
    result = compare_recordings(path, again, None)
    assert (result.differences, result.num_compared) == ([], NUM_REQUESTS)


async def test_every_kind_of_message_is_recorded_with_its_trace(deployment, tmp_path):
    path = tmp_path / "a.jsonl.zst"
    await record(deployment, path)
    messages = list(Capture(path).messages())
    kinds = {(captured.schema or "").partition("/")[0] for captured in messages}
    assert kinds == {
        *("generate_request", "accepted", "error", "work_item", "cache_command", "cache_reply", "step_plan"),
        *("step_result", "token_batch", "output_feedback", "output_chunk", "cancel", "registration"),
        *("scheduler_lease", "cache_ownership"),
    }
    assert {captured.schema for captured in messages if captured.is_stored} == {
        "registration/1",
        "scheduler_lease/1",
        "cache_ownership/1",
    }
    assert all(captured.trace for captured in messages if captured.schema == "work_item/1")
    times = [captured.arrived_s for captured in messages if not captured.is_stored]
    assert max(a - b for a, b in zip(times, times[1:], strict=False)) < 0.2
    assert not any(".v1.out." in captured.subject for captured in messages)


async def test_a_changed_answer_is_caught_with_its_first_differing_position(deployment, tmp_path):
    path = tmp_path / "a.jsonl.zst"
    await record(deployment, path, traffic=ask(deployment, "The quick brown fox", max_tokens=12, request_id="r"))
    lines = [line for line in Capture(path) if not isinstance(line, Note)]
    changed = tmp_path / "b.jsonl"
    with changed.open("wb") as file:
        file.write(Capture(path).header.model_dump_json().encode() + b"\n")
        for line in lines:
            if line.schema == "output_chunk/1" and line.body["choices"][0].get("start", 0) <= 7:
                choice = line.body["choices"][0]
                choice["token_ids"] = [
                    9 if choice.get("start", 0) + i == 7 else t for i, t in enumerate(choice["token_ids"])
                ]
            file.write(orjson.dumps(line.to_line()) + b"\n")
    result = await replay(deployment, changed)
    assert [(d.what, d.position) for d in result.differences] == [("tokens", 7)]


@pytest.mark.parametrize(("redaction", "num_compared"), [("text", 25), ("ids", 0)])
async def test_a_redacted_recording_is_compared_by_what_is_left(deployment, tmp_path, redaction, num_compared):
    path = tmp_path / "a.jsonl.zst"
    await record(deployment, path, redaction=redaction)
    raw = b"".join(orjson.dumps(line.to_line()) for line in Capture(path))
    assert b"natterjack toad" not in raw
    result = await replay(deployment, path)
    assert result.differences == []
    assert result.num_compared >= num_compared
    assert result.is_usable == (num_compared > 0)


async def test_filters_keep_one_request_or_the_kinds_that_were_named(deployment, tmp_path):
    async def traffic():
        await asyncio.gather(*(ask(deployment, "Hello", max_tokens=6, request_id=f"r{number}") for number in range(4)))

    path = tmp_path / "a.jsonl.zst"
    await record(deployment, path, "request=r2", traffic=traffic())
    outcomes = read_outcomes(Capture(path).messages())
    assert [outcome.request_id for outcome in outcomes] == ["r2"]
    schemas = {captured.schema for captured in Capture(path).messages()}
    assert {"step_plan/1", "step_result/1", "cache_reply/1", "accepted/1", "output_feedback/1"} <= schemas

    async def more():
        await ask(deployment, "Hello", max_tokens=6)

    await record(deployment, path, "output_chunk,accepted", traffic=more())
    assert {captured.schema for captured in Capture(path).messages()} == {"output_chunk/1", "accepted/1"}
    assert Capture(path).header.filters == ("accepted", "output_chunk")


async def test_a_request_is_explained_from_the_recording_and_from_the_streams(deployment, tmp_path):
    path, stored = tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl.zst"
    await record(deployment, path, traffic=ask(deployment, "Hello", max_tokens=6, request_id="r"))
    text = as_text(narrate(Capture(path).messages(), "r"), is_brief=False)
    assert "scheduler-0 → executor-0" in text
    assert "begins choice 0 on executor-0 (5 prompt tokens)" in text
    assert "the final chunk is stored" in text
    assert await record_from_streams(deployment.bus(), "r", Wish(stored)) >= 1
    assert Capture(stored).header.source == "streams"
    (outcome,) = read_outcomes(Capture(stored).messages())
    assert (outcome.is_final, outcome.num_tokens) == (True, 6)
    assert await record_from_streams(deployment.bus(), "nobody", Wish(tmp_path / "c")) == 0


async def test_a_request_that_still_waits_is_found_in_the_queue(deployment, tmp_path):
    await deployment.retire("executor-0")
    asking = asyncio.create_task(ask(deployment, "Hello", max_tokens=6, request_id="r"))
    path, bus = tmp_path / "a.jsonl.zst", deployment.bus()
    while not await record_from_streams(bus, "r", Wish(path)):
        await asyncio.sleep(0.02)
    assert [captured.schema for captured in Capture(path).messages()] == ["work_item/1"]
    assert "queued with priority normal" in as_text(narrate(Capture(path).messages(), "r"), is_brief=False)
    asking.cancel()


async def test_a_changed_stop_matcher_is_caught(deployment, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    await record(deployment, path, traffic=ask(deployment, "one two three", max_tokens=20, stop=("thr",)))
    assert (await replay(deployment, path)).differences == []
    monkeypatch.setattr(validation, "_stops", lambda request: ("three",))
    found = {d.what: (d.position, d.expected, d.found) for d in (await replay(deployment, path)).differences}
    assert found["tokens"][0] == len("one two thr")
    assert found["stop_reason"][1:] == ("thr", "three")


async def test_a_changed_sampler_is_caught(deployment, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    await record(deployment, path, traffic=ask(deployment, "abcdefgh", max_tokens=12))
    assert (await replay(deployment, path)).differences == []
    next_token = Choosing.next_token

    def without_f(self, tokens, prompt_len):
        sampling = next_token(self, tokens, prompt_len)
        return replace(sampling, banned=(*sampling.banned, ord("f")))

    monkeypatch.setattr(Choosing, "next_token", without_f)
    found = {d.what: (d.position, d.expected, d.found) for d in (await replay(deployment, path)).differences}
    assert found == {
        "tokens": (5, [*b"abcdefghabcd"], [*b"abcdegghabcd"]),
        "text": (5, "abcdefghabcd", "abcdegghabcd"),
    }


async def test_a_changed_template_is_caught(deployment, tmp_path, monkeypatch):
    def speak_as(template: str) -> None:
        changed = ChatTemplate(template, {})
        options = {"add_generation_prompt": True, "continue_final_message": False}
        monkeypatch.setattr(Validator, "_render", lambda self, request: changed.render(request.messages, **options))

    async def chat():
        message = ChatMessage(role="user", content="toad")
        request = GenerateRequest(model="smol", messages=(message,), max_tokens=12)
        async with generation.generate(deployment.bus(), request) as stream:
            async for _ in stream:
                pass

    path = tmp_path / "a.jsonl.zst"
    speak_as("{{ messages[0].content }}, say I")
    await record(deployment, path, traffic=chat())
    assert (await replay(deployment, path)).differences == []
    speak_as("{{ messages[0].content }}: say I!")
    found = {d.what: d.position for d in (await replay(deployment, path)).differences}
    assert found == {"tokens": 4, "text": 4, "usage.prompt_tokens": None}


async def test_a_wrong_preemption_is_caught(tracing, tmp_path, monkeypatch):
    """Six sequences of eight blocks in a pool of twenty-four: some begin again, here with a prompt that was damaged."""
    monkeypatch.setattr(Deployment, "_section", lambda self, role: {**SHORT, role: self.values.get(role, {})})
    path = tmp_path / "a.jsonl.zst"
    async with deployed(tracing, executor={"num_blocks": 24}) as deployment:

        async def traffic():
            prompts = [f"Number {number} is here " for number in range(6)]
            await asyncio.gather(*(ask(deployment, prompt, max_tokens=100, ignore_eos=True) for prompt in prompts))

        await record(deployment, path, traffic=traffic())
        assert read_schedule(Capture(path).messages()).preemptions.total() > 0
        assert (await replay(deployment, path)).differences == []
        reset = Sequence.reset

        def damage(self):
            reset(self)
            self.tokens[3] = ord("#")

        monkeypatch.setattr(Sequence, "reset", damage)
        differences = (await replay(deployment, path)).differences
    first = next(d for d in differences if d.what == "text")
    shown = min(first.position, CONTEXT // 2)
    assert (first.position % len("Number 0 is here "), first.found[shown]) == (3, "#")


async def test_a_takeover_shows_in_the_story(deployment, tmp_path):
    path = tmp_path / "a.jsonl.zst"

    async def traffic():
        answer = asyncio.create_task(ask(deployment, "Hello", max_tokens=200, request_id="r"))
        await asyncio.sleep(0.15)
        await deployment.kill("executor-0")
        await deployment.start("executor", "executor-0")
        assert (await answer).error is None

    await record(deployment, path, traffic=traffic())
    story = narrate(Capture(path).messages(), "r")
    assert story.num_takeovers >= 1
    assert "TAKEOVER" in as_text(story, is_brief=True)


async def test_what_the_queue_has_no_room_for_is_counted(deployment, tmp_path, monkeypatch):
    monkeypatch.setattr(wiretap, "MAX_QUEUED", 0)
    closing = await record(deployment, tmp_path / "a.jsonl.zst", traffic=ask(deployment, "Hello", max_tokens=6))
    assert closing["num_dropped"]["step_plan"] >= 6
    assert closing["num_dropped"]["generate_request"] == 1


async def test_missing_messages_are_noticed_by_their_numbers(deployment, tmp_path):
    path = tmp_path / "a.jsonl.zst"
    bus = deployment.bus()
    async with recording(bus, Wish(path)) as session:
        for step in (1, 2, 9):
            body = orjson.dumps({"scheduler": "s", "epoch": 1, "step": step})
            await bus.transport.publish(bus.subjects.plan("x"), body, {SCHEMA_HEADER: "step_plan/1"})
        await asyncio.sleep(0.05)
    assert session.closing["num_missing"] == {"step_plan": 6}


async def test_a_full_disk_ends_the_recording_and_says_so(deployment, tmp_path, monkeypatch):
    def refuse(self, line):
        raise OSError(28, "No space left on device")

    bus = deployment.bus()
    with pytest.raises(CaptureError, match="No space left"):
        async with recording(bus, Wish(tmp_path / "a.jsonl.zst")) as session:
            monkeypatch.setattr(recorder.Recorder, "_take", refuse)
            while session.recorder.error is None:
                await asyncio.sleep(0.01)
            monkeypatch.undo()
    with pytest.raises(CaptureError, match="Cannot write"):
        async with recording(bus, Wish(tmp_path / "absent" / "a")):
            pass


async def test_a_replayed_request_that_never_ends_is_a_difference(deployment, tmp_path):
    path = tmp_path / "a.jsonl.zst"
    await record(deployment, path, traffic=ask(deployment, "Hello", max_tokens=6))
    await deployment.retire("executor-0")
    capture = Capture(path)
    outcomes = read_outcomes(capture.messages())
    run = Replay(deployment.bus(), speed=None, max_concurrent=1, limit_s=0.5)
    await run.run(plan_replay(outcomes, "none", "x").requests)
    (difference,) = compare(outcomes, run.outcomes, rules_of(capture, latency=None)).differences
    assert (difference.what, difference.found) == ("end", "no end")


async def test_a_wrong_request_that_is_accepted_is_a_difference(deployment, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"

    async def wrong():
        bus = deployment.bus()
        headers = {SCHEMA_HEADER: "generate_request/1"}
        body = b'{"model": "smol", "prompt": "x", "temperature": 9, "request_id": "w"}'
        await bus.transport.request(bus.subjects.generate("smol"), body, headers, 2.0)

    await record(deployment, path, traffic=wrong())
    monkeypatch.setattr(replaying, "decode_reply", lambda kind, raw: None)
    (difference,) = (await replay(deployment, path)).differences
    assert difference.found == "refused: internal_error"
