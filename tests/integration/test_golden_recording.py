"""Today's build answers recorded requests as the build that was recorded: see tests/golden/README.md."""

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider

from schemas.control import Registration
from services.cli.replay_executor import replay_executor
from services.cli.replay_run import rules_of
from services.cli.replay_tokenizer import replay_tokenizer
from services.recording import report
from services.recording.capture_file import Capture, CaptureError
from services.recording.comparison import compare
from services.recording.engines import are_same, engines_of, recorded_engines
from services.recording.outcomes import read_outcomes
from services.recording.replay_plan import plan_replay
from services.recording.replaying import Replay
from services.recording.stage_report import as_text
from services.runtime.bus import Bus, open_bus
from services.runtime.settings import BusSettings
from services.runtime.telemetry import Tracing
from tests.integration.golden_recording import GOLDEN, OLDER


@pytest.fixture
async def bus(deployment):
    settings = BusSettings(url=deployment.nats_url, prefix=deployment.prefix)
    async with open_bus(settings, Tracing(TracerProvider()), name="golden") as bus:
        yield bus


def engines_behind(capture: Capture) -> frozenset[str]:
    """What a recording says of its engine; the older one said it in its label, beside the kernels."""
    return recorded_engines(capture) or frozenset({capture.header.label.partition(",")[0]})


@pytest.mark.parametrize("path", [GOLDEN, OLDER], ids=["today's", "an older build's"])
async def test_the_golden_recording_replays_equal(bus: Bus, path):
    """On any processor: kernels owe each other every bit. Another engine owes everything but the tokens."""
    capture = Capture(path)
    outcomes = read_outcomes(capture.messages())
    entries = await bus.kv_entries(bus.subjects.registry, Registration)
    engines = engines_of(entry.message for entry in entries)
    plan = plan_replay(outcomes, capture.header.redaction, bus.transport.new_inbox()[-8:])
    replay = Replay(bus, speed=None, max_concurrent=8, limit_s=60.0)
    await replay.run(plan.requests)
    rules = replace(rules_of(capture, latency=None), is_same_engine=are_same(engines_behind(capture), engines))
    comparison = compare(outcomes, replay.outcomes, rules, plan.skipped)
    assert not comparison.differences, report.as_text(comparison)
    assert (comparison.num_compared, comparison.skipped) == (len(outcomes), {})
    assert rules.is_same_engine or engines != frozenset({"native"})


@pytest.mark.parametrize("path", [GOLDEN, OLDER], ids=["today's", "an older build's"])
def test_the_golden_recording_holds_every_kind_of_end(path):
    capture = Capture(path)
    outcomes = read_outcomes(capture.messages())
    assert (capture.num_unreadable, capture.is_truncated, len(outcomes) > 20) == (0, False, True)
    ends = {outcome.error.code for outcome in outcomes if outcome.error is not None}
    assert {"cancelled", "context_length_exceeded", "invalid_parameter", "unsupported_parameter"} <= ends
    reasons = {choice.finish_reason for outcome in outcomes for choice in outcome.choices.values()}
    assert {"stop", "length"} <= reasons
    assert any(len(outcome.choices) == 3 for outcome in outcomes)


async def test_a_tokenizer_alone_answers_the_golden_requests_and_batches_as_the_recorded_one(model_path):
    parts = await replay_tokenizer(Capture(GOLDEN), None, [f"model.source={model_path}"])
    assert not [d for part in parts.values() for d in part.differences], as_text(parts)
    assert min(part.num_compared for part in parts.values()) > 15


async def test_an_executor_alone_runs_the_golden_plans_to_the_recorded_tokens(model_path):
    try:
        result = await replay_executor(Capture(GOLDEN), None, [f"model.source={model_path}"])
    except CaptureError as error:
        if "cannot be loaded" not in str(error):
            raise
        pytest.skip(f"recorded with the native engine, which this machine cannot run: {error}")
    assert (result.differences, result.skipped) == ([], {})
    assert result.num_compared > 20
