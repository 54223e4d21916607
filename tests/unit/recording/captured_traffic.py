"""Recordings for tests, message by message."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from schemas.cache import Acquire, CacheCommand, CacheReply, Extend, Grant, Release
from schemas.codec import Message, encode, schema_of
from schemas.control import Cancel
from schemas.errors import ErrorReply, InvalidParameter
from schemas.generation import Accepted, GenerateRequest, OutputSpec, WorkItem
from schemas.output import (
    ChoiceDelta,
    Feedback,
    NewTokens,
    OpenOutput,
    OutputChunk,
    OutputFeedback,
    RequestFailed,
    TokenBatch,
    Usage,
)
from schemas.sampling import SamplingParams
from schemas.step import NewSequence, Run, SampledToken, StepPlan, StepResult
from services.recording.arrivals import captured_of
from services.recording.capture_file import Captured, CaptureWriter, Header, Note
from services.runtime.transport import RawMessage

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADER = Header(natterjack="0.1.0", started_s=1000.0, prefix="nj")


def captured(
    message: Message, subject: str, at_s: float, *, reply: str | None = None, headers: dict[str, str] | None = None
) -> Captured:
    """Return a message as the wiretap hears it."""
    sent = {"Nj-Schema": schema_of(message), "traceparent": TRACE, **(headers or {})}
    found = captured_of(at_s, RawMessage(subject, sent, encode(message), reply))
    assert found is not None
    return found


def refused(inbox: str, at_s: float, *, answers: str = "nj.v1.generate.smol") -> Captured:
    """Return a refusal, beside its request."""
    error = InvalidParameter("temperature must be at most 2.", param="temperature")
    body = ErrorReply(error=error.body()).model_dump(mode="json")
    return Captured(at_s, inbox, body, schema="error", answers=answers)


def one_request(
    name: str = "req-1",
    *,
    at_s: float = 1000.0,
    tokens: Iterable[int] = (11, 12, 13),
    text: str = "abc",
    seed: int | None = 7,
    drawn_seed: int = 7,
    prompt: str = "Hi",
    n: int = 1,
    stop: tuple[str, ...] = (),
    finish_reason: str = "length",
) -> list[Captured]:
    """Return the two ends of one request's path: asked, accepted, queued, and a chunk per token."""
    tokens = list(tokens)
    request = GenerateRequest(
        model="smol", request_id=name, prompt=prompt, max_tokens=8, seed=seed, n=n, stop=stop or None, temperature=1.0
    )
    spec = OutputSpec(request_id=name, model="smol", created_s=at_s, num_prompt_tokens=2, n=n, stop=stop)
    work = WorkItem(
        request_id=name,
        model="smol",
        created_s=at_s,
        prompt_token_ids=(72, 105),
        max_tokens=8,
        n=n,
        sampling=SamplingParams(seed=drawn_seed),
        tokenizer="tokenizer-0",
        output=spec,
    )
    inbox, live = f"_INBOX.{name}", f"nj.v1.live.{name}"
    accepted = Accepted(request_id=name, model="smol", num_prompt_tokens=2, created_s=at_s)
    messages = [
        captured(request, "nj.v1.generate.smol", at_s, reply=inbox),
        captured(work, "nj.v1.work.smol.normal", at_s + 0.01),
        captured(accepted, inbox, at_s + 0.02),
    ]
    for number, token in enumerate(tokens):
        is_last = number == len(tokens) - 1
        deltas = tuple(
            ChoiceDelta(
                index=index,
                start=number,
                token_ids=(token,),
                text=text[number : number + 1] if not is_last else text[number:],
                finish_reason=finish_reason if is_last else None,
            )
            for index in range(n)
        )
        usage = Usage(prompt_tokens=2, completion_tokens=n * len(tokens)) if is_last else None
        chunk = OutputChunk(
            request_id=name, model="smol", created_s=at_s, epoch=1, choices=deltas, final=is_last, usage=usage
        )
        numbers = {"Nats-Sequence": str(number + 1), "Nats-Last-Sequence": str(number)}
        messages.append(captured(chunk, live, at_s + 0.1 * (number + 1), headers=numbers))
    return messages


def inner_path(name: str = "req-1", *, at_s: float = 1000.03) -> list[Captured]:
    """Return what the services say to each other of one request: refused blocks, a preemption, a takeover, an end."""
    clock = itertools.count()

    def say(message: Message, subject: str, **options: Any) -> Captured:
        return captured(message, subject, at_s + 0.001 * next(clock), **options)

    def ask(number: int, *operations: Any, epoch: int = 4) -> Captured:
        command = CacheCommand(scheduler="scheduler-0", executor="executor-0", epoch=epoch, operations=operations)
        return say(command, "nj.v1.cache.smol", reply=f"_INBOX.cache-{number}")

    def answer(number: int, *grants: Grant, num_free: int = 5) -> Captured:
        return say(CacheReply(grants=grants, num_free=num_free, num_blocks=9), f"_INBOX.cache-{number}")

    def begin(sequence: int, *, known: int, epoch: int = 4) -> NewSequence:
        return NewSequence(
            sequence=sequence,
            request_id=name,
            token_ids=(72, 105, *range(known)),
            prompt_len=2,
            max_len=10,
            num_computed=1,
            blocks=(1,),
            sampling=SamplingParams(),
        )

    def plan(step: int, **options: Any) -> Captured:
        epoch = options.pop("epoch", 4)
        return say(StepPlan(scheduler="scheduler-0", epoch=epoch, step=step, **options), "nj.v1.exec.executor-0.plan")

    def result(step: int, token: SampledToken, epoch: int = 4) -> Captured:
        sampled = (token, SampledToken(sequence=99, position=1, token=1))
        return say(
            StepResult(executor="executor-0", epoch=epoch, step=step, sampled=sampled, duration_s=0.002),
            "nj.v1.exec.executor-0.result",
        )

    spec = OutputSpec(request_id=name, model="smol", created_s=at_s, num_prompt_tokens=2)
    opened = TokenBatch(
        scheduler="scheduler-0",
        opened=(OpenOutput(spec=spec, epoch=1),),
        tokens=(NewTokens(request_id=name, epoch=1, start=0, token_ids=(11,)),),
    )
    failed = TokenBatch(
        scheduler="scheduler-0",
        failed=(RequestFailed(request_id=name, epoch=1, error=InvalidParameter("no").body()),),
    )
    feedback = OutputFeedback(
        tokenizer="tokenizer-0",
        items=(
            Feedback(request_id=name, epoch=1, event="lost", num_tokens=3),
            Feedback(request_id=name, epoch=1, event="stored"),
            Feedback(request_id="other", epoch=1, event="stored"),
        ),
    )
    return [
        ask(1, Acquire(sequence=1, request_id=name, num_tokens=10), Release(sequence=50)),
        answer(1, Grant(sequence=1, granted=False), num_free=0),
        ask(2, Acquire(sequence=2, request_id=name, num_tokens=10)),
        answer(2, Grant(sequence=2, blocks=(1,), num_cached=1)),
        plan(1, new=(begin(2, known=0),), run=(Run(sequence=2, num_tokens=2), Run(sequence=99))),
        result(1, SampledToken(sequence=2, position=2, token=11)),
        say(opened, "nj.v1.detok.tokenizer-0"),
        ask(3, Extend(sequence=2, num_tokens=20, num_held=1)),
        plan(2, drop=(2,)),
        ask(4, Acquire(sequence=3, request_id=name, num_tokens=10)),
        plan(3, new=(begin(3, known=1),), run=(Run(sequence=3),)),
        ask(5, Acquire(sequence=1, request_id=name, num_tokens=10), epoch=8),
        plan(1, epoch=8, new=(begin(1, known=1),), run=(Run(sequence=1),)),
        result(1, SampledToken(sequence=1, position=3, token=12, finish_reason="length"), epoch=8),
        say(failed, "nj.v1.detok.tokenizer-0"),
        say(Cancel(request_id=name), f"nj.v1.cancel.{name}"),
        say(feedback, "nj.v1.feedback.scheduler-0"),
        ask(6, Release(sequence=1), epoch=8),
    ]


def write(path: Path, lines: Iterable[Captured | Note], header: Header = HEADER) -> Path:
    """Write a recording and return its path."""
    with CaptureWriter(path, header) as writer:
        for line in lines:
            writer.write(line)
    return path
