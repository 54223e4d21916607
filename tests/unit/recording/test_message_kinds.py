"""Every message of the contract is recorded or left out on purpose, and the wiretap hears what is recorded."""

import importlib
import json
import pkgutil
from pathlib import Path

import pytest

import schemas
from schemas.codec import SCHEMA_HEADER, Message, schema_of
from services.recording import recorder
from services.recording.capture_file import Capture
from services.recording.filters import parse_filters
from services.recording.message_kinds import KINDS, LEFT_OUT
from services.recording.session import Wish, recording
from services.runtime.bus import Bus

GOLDEN = Path(__file__).parents[2] / "contract" / "golden"


def every_message() -> dict[str, type[Message]]:
    for module in pkgutil.iter_modules(schemas.__path__):
        importlib.import_module(f"schemas.{module.name}")
    return {kind.SCHEMA: kind for kind in Message.__subclasses__() if kind.__module__.startswith("schemas.")}


def subject_of(bus: Bus, name: str) -> str:
    names, model = bus.subjects, "smol"
    buckets = {"registration": names.registry, "effective_config": names.config}
    buckets |= dict.fromkeys(("scheduler_lease", "handed_back", "pause", "cache_ownership"), names.leases)
    if name in buckets:
        return f"$KV.{buckets[name]}.key"
    subjects = {
        "generate_request": names.generate(model),
        "tokenize_request": names.tokenize(model),
        "detokenize_request": names.detokenize(model),
        "cache_command": names.cache(model),
        "control_request": names.control("executor"),
        "work_item": names.work(model, "normal"),
        "step_plan": names.plan("executor-0"),
        "step_result": names.result("executor-0"),
        "token_batch": names.detok("tokenizer-0"),
        "output_feedback": names.feedback("scheduler-0"),
        "output_chunk": names.live("r"),
        "cancel": names.cancel("r"),
        "keep_trace": names.keep_trace,
        "span_batch": names.spans("executor"),
        "metric_sample": names.samples("executor"),
        "trace_query": names.trace(),
    }
    return subjects.get(name, names.all_of().replace(">", f"somewhere.{name}"))


REPLY_TO = {
    "accepted": "generate_request",
    "tokenize_reply": "tokenize_request",
    "detokenize_reply": "detokenize_request",
    "cache_reply": "cache_command",
    "control_reply": "control_request",
    "trace_reply": "trace_query",
}


def test_every_message_is_recorded_or_left_out_for_a_reason():
    known = every_message()
    assert set(KINDS) | set(LEFT_OUT) == set(known), (
        "add it to KINDS or LEFT_OUT of services/recording/message_kinds.py"
    )
    assert not set(KINDS) & set(LEFT_OUT)
    assert all(known[name] is kind for name, kind in KINDS.items())


async def say(bus: Bus, name: str) -> None:
    inbox = f"_INBOX.{name}"
    if name in REPLY_TO:
        asked = REPLY_TO[name]
        await publish(bus, subject_of(bus, asked), asked, inbox)
        await publish(bus, inbox, name)
    else:
        await publish(bus, subject_of(bus, name), name, inbox)


async def publish(bus: Bus, subject: str, name: str, reply: str | None = None) -> None:
    headers = {SCHEMA_HEADER: schema_of(every_message()[name])}
    await bus.transport.publish(subject, golden(name), headers, reply)


def golden(name: str) -> bytes:
    return json.dumps(json.loads((GOLDEN / f"{name}.json").read_bytes())["body"]).encode()


@pytest.mark.parametrize("is_filtered", [False, True])
async def test_the_wiretap_hears_what_is_recorded_and_no_more(
    memory_bus, tmp_path, eventually, monkeypatch, is_filtered
):
    monkeypatch.setattr(recorder, "FLUSH_PERIOD_S", 0.02)
    for name in KINDS if is_filtered else [None]:
        path = tmp_path / f"{name}.zst"
        filters = parse_filters([name] if name else [])
        async with recording(memory_bus, Wish(path, filters)) as session:
            for spoken in [name] if name else [*KINDS, *LEFT_OUT]:
                await say(memory_bus, spoken)
            await eventually(lambda session=session: session.recorder.totals.num_messages > 0)
        heard = {(captured.schema or "").partition("/")[0]: captured for captured in Capture(path).messages()}
        assert set(heard) == ({name} if name else set(KINDS)), name
        for reply, asked in REPLY_TO.items():
            if reply in heard:
                assert heard[reply].answers == subject_of(memory_bus, asked)


@pytest.mark.parametrize("name", KINDS)
def test_the_golden_message_of_every_kind_can_be_read_again(name):
    assert isinstance(KINDS[name].model_validate_json(golden(name)), Message)
