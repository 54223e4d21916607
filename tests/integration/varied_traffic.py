"""Traffic of every kind that a recording should hold: greedy and seeded, n, stops, logprobs, long, cancelled, wrong."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterable

from schemas.codec import SCHEMA_HEADER
from schemas.errors import NatterjackError
from schemas.generation import ChatMessage, GenerateRequest
from services.runtime.bus import Bus
from services.runtime.generation import generate

LONG = "The natterjack toad runs rather than hops, and its call carries far across the dunes at night. " * 8


def varied_requests(model: str = "smol", *, chat: bool = True) -> list[GenerateRequest]:
    """Return one request of every kind that can be answered; none takes more than 48 tokens."""
    ask = GenerateRequest(model=model, max_tokens=24)
    requests = [
        _with(ask, prompt="The capital of France is", temperature=0.0),
        _with(ask, prompt="Once upon a time", temperature=0.0, max_tokens=48),
        _with(ask, prompt="Once upon a time", temperature=1.0, seed=7),
        _with(ask, prompt="Once upon a time", temperature=1.0),
        _with(ask, prompt="A toad", temperature=0.8, top_p=0.9, top_k=40, seed=11),
        _with(ask, prompt="A toad", temperature=1.0, min_p=0.1, seed=-3),
        _with(ask, prompt="Numbers: one, two,", temperature=0.7, n=3, seed=5),
        _with(ask, prompt="Numbers: one, two,", temperature=0.0, stop=("four", "\n")),
        _with(ask, prompt="Colours are", temperature=0.0, stop="e", include_stop_str_in_output=True),
        _with(ask, prompt=(1, 9, 17, 33), temperature=0.0, max_tokens=8),
        _with(ask, prompt="Ends at once", temperature=0.0, max_tokens=1),
        _with(ask, prompt="Likely words", temperature=0.0, max_tokens=6, logprobs=2),
        _with(ask, prompt=LONG, temperature=0.0, max_tokens=16),
        _with(ask, prompt=LONG + "Besides,", temperature=0.0, max_tokens=16),
        _with(ask, prompt="Go on", temperature=0.0, ignore_eos=True, min_tokens=4, priority="high"),
    ]
    if chat:
        question = (ChatMessage(role="user", content="What is a natterjack?"),)
        requests += [
            _with(ask, messages=question, temperature=0.0),
            _with(ask, messages=question, temperature=1.0, seed=1, n=2),
        ]
    return requests


def wrong_requests(model: str = "smol") -> list[GenerateRequest]:
    """Return requests that are refused, each for another reason."""
    ask = GenerateRequest(model=model, prompt="x", max_tokens=4)
    return [
        _with(ask, max_tokens=10_000_000),
        _with(ask, n=2, temperature=0.0),
        _with(ask, stop=("",)),
        GenerateRequest(model=model, max_tokens=4),
        GenerateRequest.model_validate({"model": model, "prompt": "x", "use_beam_search": True}),
    ]


def _with(request: GenerateRequest, **changes: object) -> GenerateRequest:
    return request.model_copy(update=changes)


async def send(bus: Bus, request: GenerateRequest) -> None:
    """Run one request to its end, whatever that is."""
    with contextlib.suppress(NatterjackError):
        async with generate(bus, request) as generation:
            async for _ in generation:
                pass


async def send_and_leave(bus: Bus, request: GenerateRequest, num_chunks: int) -> None:
    """Cancel a request after some chunks, and wait for its end."""
    async with generate(bus, request) as generation:
        cancelling = None
        seen = 0
        async for _ in generation:
            seen += 1
            if seen == num_chunks:
                cancelling = asyncio.create_task(generation.cancel())
        if cancelling is not None:
            await cancelling


async def send_malformed(bus: Bus, model: str = "smol") -> None:
    """Send what is no request: a wrong value, and no JSON at all."""
    for body in (b'{"prompt": "x", "temperature": 9}', b"not json"):
        await bus.transport.request(bus.subjects.generate(model), body, {SCHEMA_HEADER: "generate_request/1"}, 5.0)


async def send_all(bus: Bus, requests: Iterable[GenerateRequest], *, at_a_time: int = 8, pause_s: float = 0.0) -> None:
    """Run requests, so many at a time."""
    waiting = list(requests)

    async def worker() -> None:
        while waiting:
            await send(bus, waiting.pop(0))
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(worker() for _ in range(at_a_time)))


async def send_everything(bus: Bus, model: str = "smol", *, chat: bool = True, num_requests: int = 0) -> None:
    """Send every kind once, then more of the first kinds up to `num_requests` in all."""
    kinds = varied_requests(model, chat=chat)
    wrong = wrong_requests(model)
    more = itertools.islice(itertools.cycle(kinds), max(0, num_requests - len(kinds) - len(wrong) - 4))
    story = _with(kinds[1], max_tokens=400, ignore_eos=True)
    await asyncio.gather(
        send_all(bus, [*kinds, *wrong, *more]), send_malformed(bus, model), send_and_leave(bus, story, 3)
    )
    await send_and_leave(bus, story, 1)
