"""Replays tokenizers from a recording: their requests again, and the token batches that they were sent.

The front door: every recorded request goes to a tokenizer of today's build, and the work item or the error that comes
out is compared. The way back: every recorded token batch goes to the tokenizer of its name, and what it appends to the
output logs is compared, put together: how tokens are cut into chunks is a matter of time, what they say is not.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from schemas.codec import SCHEMA_HEADER, decode, encode, schema_of
from schemas.errors import NatterjackError
from schemas.generation import Accepted, GenerateRequest, WorkItem
from schemas.output import OutputChunk, TokenBatch
from schemas.subjects import raw_of
from services.cli.replay_service import (
    RecordedInstances,
    Stage,
    open_stage,
    read_instances,
    recorded_values,
    usable_settings,
)
from services.recording.capture_file import Capture, CaptureError
from services.recording.comparison import TIMED_ERRORS, Comparison, Difference, Rules, compare, ending
from services.recording.message_kinds import kind_name, message_of
from services.recording.outcomes import Outcome, read_outcomes
from services.recording.replay_plan import seed_of
from services.recording.work_comparison import compare_work
from services.runtime.bus import decode_reply
from services.runtime.transport import RawMessage
from services.tokenizer.service import TokenizerService
from services.tokenizer.settings import Settings

ANSWER_TIMEOUT_S = 60.0
DEFAULT_INSTANCE = "tokenizer-0"
EXACT = Rules(is_exact=True)


@dataclass(slots=True)
class _Heard:
    """What the replayed tokenizers say."""

    stage: Stage
    works: dict[str, WorkItem] = field(default_factory=dict)
    outputs: dict[str, Outcome] = field(default_factory=dict)

    def take_work(self, raw: RawMessage) -> None:
        work = decode(WorkItem, raw.headers, raw.body)
        self.works[work.request_id] = work
        self.stage.forget(self.stage.subjects.work_stream, raw.subject)

    def take_chunk(self, raw: RawMessage) -> None:
        """A chunk after the final one is that of a tokenizer that could not know of the first."""
        chunk = decode(OutputChunk, raw.headers, raw.body)
        outcome = self.outputs.setdefault(chunk.request_id, Outcome(chunk.request_id))
        if outcome.is_final:
            return
        outcome.add_chunk(chunk, 0.0)
        if chunk.final:
            subjects = self.stage.subjects
            self.stage.forget(subjects.out_stream, subjects.out(chunk.request_id))


async def replay_tokenizer(capture: Capture, file: Path | None, overrides: Iterable[str]) -> dict[str, Comparison]:
    """Return how requests and outputs compare, under these names; raises CaptureError."""
    if capture.header.redaction != "none":
        raise CaptureError(
            f"In {capture.path}, {capture.header.redaction} was redacted, which a tokenizer cannot do without: "
            "record with --redact none."
        )
    instances = read_instances(capture)
    settings = usable_settings(Settings, "tokenizer", file, overrides, recorded_values(instances, "tokenizer"))
    outcomes = read_outcomes(capture.messages())
    names = _tokenizers(capture)
    async with open_stage(capture.header.prefix) as stage, contextlib.AsyncExitStack() as stack:
        for registration in instances.executors.values():
            await stage.introduce(registration)
        heard = _Heard(stage)
        await stage.connect().transport.subscribe(stage.subjects.work_all, heard.take_work)
        await stage.connect().transport.subscribe(stage.subjects.live_all, heard.take_chunk)
        running = [
            await stack.enter_async_context(stage.running("tokenizer", name, settings, TokenizerService))
            for name in sorted(names or {DEFAULT_INSTANCE})
        ]
        requests = await _replay_requests(stage, outcomes, heard, instances)
        opened = await _feed_batches(stage, capture)
        for service in running:
            await service.drain()
        await asyncio.sleep(0)
    outputs = _compare_outputs(outcomes, opened, heard)
    if not requests.is_usable and not outputs.is_usable:
        raise CaptureError(
            f"{capture.path} holds nothing for a tokenizer: it needs generate_request with work_item and error, or "
            "token_batch with output_chunk."
        )
    return {"requests": requests, "outputs": outputs}


def _tokenizers(capture: Capture) -> set[str]:
    """Return the names of the tokenizers that were sent tokens."""
    subjects = {c.subject for c in capture.messages() if kind_name(c) == TokenBatch.SCHEMA}
    return {raw_of(subject.rpartition(".")[2]) for subject in subjects}


# ---- the front door


async def _replay_requests(
    stage: Stage, outcomes: Iterable[Outcome], heard: _Heard, instances: RecordedInstances
) -> Comparison:
    result = Comparison(rules=EXACT)
    for outcome in outcomes:
        if (reason := _not_comparable(outcome)) is not None:
            result.skipped[outcome.request_id] = reason
            continue
        result.num_compared += 1
        result.num_tokens += len(outcome.work.prompt_token_ids) if outcome.work is not None else 0
        found = await _ask(stage, outcome)
        result.differences += _compare_answer(outcome, found, heard.works.pop(outcome.request_id, None))
    return result


def _not_comparable(outcome: Outcome) -> str | None:
    if outcome.asked_s is None:
        return "the recording does not hold the request itself"
    if isinstance(outcome.asked, dict) and outcome.asked.get("resume"):
        return "it asks for stored output"
    if outcome.work is None and not outcome.is_refused:
        return "the recording holds neither its work item nor its refusal"
    if outcome.is_refused and outcome.error is not None and outcome.error.code in TIMED_ERRORS:
        return "it was refused because of load"
    return None


async def _ask(stage: Stage, outcome: Outcome) -> NatterjackError | None:
    """Send the request as it was, with the id and the seed that it was given; return the refusal."""
    body = outcome.asked
    if isinstance(body, dict):
        named = {} if outcome.work is None else {"request_id": outcome.request_id, **seed_of(outcome)}
        body = {**body, **named}
    raw = body.encode() if isinstance(body, str) else orjson.dumps(body)
    transport, headers = stage.connect().transport, {SCHEMA_HEADER: schema_of(GenerateRequest)}
    try:
        decode_reply(Accepted, await transport.request(outcome.subject, raw, headers, ANSWER_TIMEOUT_S))
    except NatterjackError as error:
        return error
    return None


def _compare_answer(outcome: Outcome, found: NatterjackError | None, work: WorkItem | None) -> Iterable[Difference]:
    answered = Outcome(outcome.request_id)
    if found is not None:
        answered.refuse(found.body(), 0.0)
    expected = ending(outcome) if outcome.is_refused else "accepted"
    actual = ending(answered) if found is not None else "accepted"
    if expected != actual:
        return [Difference(outcome.request_id, "answer", expected, actual)]
    if outcome.work is None or work is None:
        return []
    return compare_work(outcome.work, work)


# ---- the way back


async def _feed_batches(stage: Stage, capture: Capture) -> set[str]:
    """Send every recorded batch to its tokenizer; return the requests whose output was opened from its beginning."""
    opened: set[str] = set()
    transport = stage.connect().transport
    for captured in capture.messages():
        batch = message_of(captured, TokenBatch) if kind_name(captured) == TokenBatch.SCHEMA else None
        if batch is None:
            continue
        opened.update(o.spec.request_id for o in batch.opened if not o.resume)
        await transport.publish(captured.subject, encode(batch), {SCHEMA_HEADER: schema_of(batch)})
        await asyncio.sleep(0)
    return opened


def _compare_outputs(outcomes: Iterable[Outcome], opened: set[str], heard: _Heard) -> Comparison:
    expected = [outcome for outcome in outcomes if not outcome.is_refused]
    skipped = {
        outcome.request_id: "the recording does not hold the beginning of its output"
        for outcome in expected
        if outcome.request_id not in opened
    }
    result = compare(expected, heard.outputs, EXACT, skipped)
    result.unit, result.before, result.after = "outputs", None, None
    return result
