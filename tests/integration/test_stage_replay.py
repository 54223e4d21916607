"""One service of this build fed alone with what a recorded one was sent: equal as long as nothing was changed."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schemas.generation import ChatMessage, GenerateRequest
from services.cli.app import app
from services.cli.replay_executor import replay_executor
from services.cli.replay_tokenizer import replay_tokenizer
from services.executor.choosing import Choosing
from services.recording import recorder, stage_report
from services.recording.capture_file import Capture, Captured, CaptureError, CaptureWriter
from services.recording.filters import parse_filters
from services.recording.session import Wish, recording
from services.runtime import generation
from services.runtime.telemetry import Tracing
from services.scheduler import service as scheduler_service
from services.tokenizer import request_output, validation
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.stop_strings import StopStrings
from tests.integration.services_in_memory import Deployment, ask, deployed
from tests.integration.varied_traffic import send_everything

BYTES = ("model.source=builtin:bytes",)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_service, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(generation, "CANCEL_PERIOD_S", 0.05)
    monkeypatch.setattr(recorder, "FLUSH_PERIOD_S", 0.1)


@pytest.fixture
async def deployment(tracing: Tracing) -> AsyncIterator[Deployment]:
    async with deployed(tracing, executors=2) as deployment:
        yield deployment


async def record(deployment: Deployment, path: Path, traffic=None, filters: tuple[str, ...] = (), **wish) -> Capture:
    async with recording(deployment.bus(), Wish(path, parse_filters(filters), **wish)):
        await (traffic or send_everything(deployment.bus(), chat=False, num_requests=40))
        await asyncio.sleep(0.1)
    return Capture(path)


async def test_the_tokenizer_answers_recorded_requests_and_batches_as_it_did(deployment, tmp_path):
    capture = await record(deployment, tmp_path / "a.zst")
    parts = await replay_tokenizer(capture, None, BYTES)
    assert stage_report.as_json("tokenizer", parts)["equal"], stage_report.as_text(parts)
    assert parts["requests"].num_compared == 40
    assert parts["outputs"].num_compared >= 30
    assert parts["outputs"].num_tokens > 300
    assert parts["requests"].skipped == {}


async def test_executors_run_recorded_plans_to_the_same_tokens(deployment, tmp_path):
    capture = await record(deployment, tmp_path / "a.zst")
    result = await replay_executor(capture, None, ())
    assert result.differences == []
    assert (result.num_compared, result.skipped) == (len({*_begun(capture)}), {})
    assert result.num_tokens > 300


def _begun(capture: Capture):
    for captured in capture.messages():
        if captured.schema == "step_plan/1":
            for new in captured.body.get("new", ()):
                yield captured.subject, captured.body["epoch"], new["sequence"]


async def test_an_executor_whose_blocks_go_to_host_memory_and_come_back_is_replayed(tracing, tmp_path):
    prompts = [f"{letter}{'toads and frogs ' * 25}" for letter in "abca"]

    async def traffic():
        for prompt in prompts:
            assert (await ask(deployment, prompt, max_tokens=5)).text[0] == prompt[:5]

    async with deployed(tracing, executor={"num_blocks": 40, "host_kv_cache_bytes": 10_000}) as deployment:
        capture = await record(deployment, tmp_path / "a.zst", traffic())
    copies = [c.body.get("copies") for c in capture.messages() if c.schema == "step_plan/1"]
    assert any(source >= 40 for plan in copies if plan for source, _ in plan), "nothing came back"
    result = await replay_executor(capture, None, ())
    assert (result.num_compared, result.num_tokens, result.differences) == (4, 20, [])


async def test_an_executor_that_is_met_idle_in_the_middle_of_its_life_is_replayed(deployment, tmp_path):
    await ask(deployment, "Before the recording", max_tokens=5)
    capture = await record(deployment, tmp_path / "a.zst", ask(deployment, "Within it", max_tokens=9))
    result = await replay_executor(capture, None, ())
    assert (result.num_compared, result.num_tokens, result.differences) == (1, 9, [])


async def test_a_tokenizer_that_was_replaced_is_replayed_beside_its_successor(deployment, tmp_path):
    async def traffic():
        await deployment.start("tokenizer", "tokenizer-1")
        answers = [asyncio.create_task(ask(deployment, f"Number {n}", max_tokens=120)) for n in range(4)]
        await asyncio.sleep(0.15)
        await deployment.kill("tokenizer-0")
        assert {(await answer).error for answer in answers} == {None}

    capture = await record(deployment, tmp_path / "a.zst", traffic())
    parts = await replay_tokenizer(capture, None, BYTES)
    assert stage_report.as_json("tokenizer", parts)["equal"], stage_report.as_text(parts)
    assert parts["outputs"].num_compared == 4


# ---- what is changed is found, with its position


async def test_a_changed_sampler_is_caught_at_its_first_token(deployment, tmp_path, monkeypatch):
    capture = await record(deployment, tmp_path / "a.zst", ask(deployment, "abcdefgh", max_tokens=12))
    next_token = Choosing.next_token

    def without_token_5(self, tokens, prompt_len):
        sampling = next_token(self, tokens, prompt_len)
        return replace(sampling, banned=(*sampling.banned, ord("f"))) if len(tokens) - prompt_len >= 5 else sampling

    monkeypatch.setattr(Choosing, "next_token", without_token_5)
    (difference,) = (await replay_executor(capture, None, ())).differences
    assert (difference.what, difference.position) == ("tokens", 5)
    assert (difference.expected[5], difference.found[5]) == (ord("f"), ord("g"))


async def test_a_changed_stop_matcher_is_caught_at_its_first_character(deployment, tmp_path, monkeypatch):
    asked = ask(deployment, "one two three ", max_tokens=30, stop=("thr", "two t"))
    capture = await record(deployment, tmp_path / "a.zst", asked)
    monkeypatch.setattr(request_output, "StopStrings", lambda stops: StopStrings(()))
    outputs = (await replay_tokenizer(capture, None, BYTES))["outputs"]
    whats = {difference.what: difference for difference in outputs.differences}
    assert (whats["text"].position, whats["stop_reason"].expected) == (4, "two t")
    assert whats["text"].found.startswith("one two t")


async def test_a_changed_template_is_caught_at_its_first_token(deployment, tmp_path, monkeypatch):
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    changed = ChatTemplate("{% for m in messages %}[{{ m.content }}}{% endfor %}", {})
    monkeypatch.setattr(validation.Validator, "_render", lambda self, r: template.render(r.messages, **OPTIONS))
    bus = deployment.bus()

    async def chat():
        message = ChatMessage(role="user", content="toad")
        request = GenerateRequest(model="smol", messages=(message,), max_tokens=3)
        async with generation.generate(bus, request) as stream:
            async for _ in stream:
                pass

    capture = await record(deployment, tmp_path / "a.zst", chat())
    monkeypatch.setattr(validation.Validator, "_render", lambda self, r: changed.render(r.messages, **OPTIONS))
    requests = (await replay_tokenizer(capture, None, BYTES))["requests"]
    assert [(d.what, d.position) for d in requests.differences] == [("work.prompt_token_ids", len("[toad"))]


OPTIONS = {"add_generation_prompt": True, "continue_final_message": False, "tools": None, "variables": None}


async def test_a_changed_validation_is_caught_by_its_error(deployment, tmp_path, monkeypatch):
    capture = await record(deployment, tmp_path / "a.zst")
    monkeypatch.setattr(validation, "_check_stops", lambda stops: None)
    monkeypatch.setattr(validation.Validator, "check_model", lambda self, model: None)
    differences = (await replay_tokenizer(capture, None, BYTES))["requests"].differences
    assert [(d.what, d.expected) for d in differences] == [("answer", "refused: invalid_parameter (stop)")]


# ---- what a recording must hold


@pytest.mark.parametrize("stage", ["tokenizer", "executor"])
async def test_a_redacted_recording_is_refused(deployment, tmp_path, stage):
    capture = await record(deployment, tmp_path / "a.zst", ask(deployment, "Hello", max_tokens=3), redaction="ids")
    with pytest.raises(CaptureError, match="redacted"):
        await (replay_tokenizer(capture, None, BYTES) if stage == "tokenizer" else replay_executor(capture, None, ()))


async def test_token_ids_are_enough_for_an_executor(deployment, tmp_path):
    capture = await record(deployment, tmp_path / "a.zst", ask(deployment, "Hello", max_tokens=3), redaction="text")
    assert (await replay_executor(capture, None, ())).num_compared == 1
    with pytest.raises(CaptureError, match="redacted"):
        await replay_tokenizer(capture, None, BYTES)


async def test_cached_blocks_from_before_the_recording_are_refused(deployment, tmp_path):
    prompt = "A prefix that fills several blocks of sixteen tokens, and more."
    await asyncio.gather(*(ask(deployment, prompt, max_tokens=3) for _ in range(4)))
    again = asyncio.gather(*(ask(deployment, prompt, max_tokens=3) for _ in range(4)))
    capture = await record(deployment, tmp_path / "a.zst", again)
    with pytest.raises(CaptureError, match="before the recording began"):
        await replay_executor(capture, None, ())


async def test_plans_behind_a_missing_one_are_left_out(deployment, tmp_path):
    capture = await record(deployment, tmp_path / "a.zst", ask(deployment, "Hello", max_tokens=9))
    number = 0
    with CaptureWriter(tmp_path / "b.zst", capture.header) as writer:
        for line in capture:
            number += isinstance(line, Captured) and line.schema == "step_plan/1"
            if not (isinstance(line, Captured) and line.schema == "step_plan/1" and number == 4):
                writer.write(line)
    result = await replay_executor(Capture(tmp_path / "b.zst"), None, ())
    assert "behind a missing one" in result.skipped["plans"]
    assert (result.num_compared, [d.position for d in result.differences]) == (1, [3])


def test_the_command_prints_what_it_found_and_says_what_it_lacks(tracing, tmp_path):
    path, only = tmp_path / "a.zst", tmp_path / "b.zst"

    async def record_both() -> None:
        async with deployed(tracing) as deployment:
            await record(deployment, path, ask(deployment, "Hello", max_tokens=5))
            await record(deployment, only, ask(deployment, "Hello", max_tokens=5), filters=("cancel",))

    asyncio.run(record_both())

    def command(stage: str, file: Path, *options: str):
        return CliRunner().invoke(app, ["replay", str(file), "--stage", stage, *options])

    said = command("executor", path, "--json")
    assert (said.exit_code, json.loads(said.stdout)["sequences"]["num_tokens"]) == (0, 5)
    said = command("tokenizer", path, "--set", BYTES[0])
    assert (said.exit_code, said.stdout.splitlines()) == (
        0,
        ["EQUAL: 1 requests with 5 tokens.", "EQUAL: 1 outputs with 5 tokens."],
    )
    assert command("tokenizer", path, "--set", BYTES[0], "--set", "model.name=other").exit_code == 1
    for stage, file, options in (
        ("executor", only, ()),
        ("tokenizer", only, ("--set", BYTES[0])),
        ("scheduler", only, ()),
        ("executor", tmp_path / "absent", ()),
        ("executor", path, ("--set", "executor.engine=nothing")),
    ):
        said = command(stage, file, *options)
        assert (said.exit_code, bool(said.stderr)) == (2, True), (stage, options, said.output)
