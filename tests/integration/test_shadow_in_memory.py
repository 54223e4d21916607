"""The mirror between two pipelines of real services over the bus in memory: which requests, and what is dropped."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from schemas.generation import GenerateRequest
from schemas.subjects import Subjects
from services.recording import shadowing as mirror
from services.recording.agreement import Agreement, as_json, as_rows
from services.recording.comparison import Rules
from services.recording.shadowing import Shadow, ShadowLimits, is_chosen
from services.runtime import generation
from services.runtime.bus import Bus
from services.runtime.generation import generate
from services.runtime.memory_transport import MemoryServer
from services.runtime.telemetry import Tracing
from tests.integration.services_in_memory import QUICK_SCHEDULER, Deployment, YieldingTransport
from tests.integration.varied_traffic import send_all, send_and_leave, varied_requests

ROLES = ("cache_manager", "scheduler", "tokenizer", "executor")
ECHO = {"engine": "echo", "num_blocks": 256, "step_time_s": 0.001}


@dataclass
class Pipeline(Deployment):
    """A deployment under a prefix of its own."""

    prefix: str = "test"

    def bus(self) -> Bus:
        return Bus(YieldingTransport(self.server), Subjects(self.prefix), self.tracing)

    async def start_all(self) -> None:
        for role in ROLES:
            await self.start(role, f"{role}-0")
        await self.wait_ready()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "CANCEL_PERIOD_S", 0.05)
    monkeypatch.setattr(generation, "POLL_S", 0.2)


@pytest.fixture
async def pipelines(tracing: Tracing) -> AsyncIterator[tuple[Pipeline, Pipeline]]:
    server = MemoryServer()
    async with contextlib.AsyncExitStack() as stack:
        values = {"scheduler": QUICK_SCHEDULER, "executor": ECHO}
        both = [Pipeline(tracing, values, server, prefix=prefix) for prefix in ("one", "two")]
        for pipeline in both:
            stack.push_async_callback(pipeline.close)
        await asyncio.gather(*(pipeline.start_all() for pipeline in both))
        yield both[0], both[1]


@contextlib.asynccontextmanager
async def shadowing(pipelines, kind=Shadow, rules: Rules | None = None, **limits) -> AsyncIterator[Agreement]:
    """Mirror while the block runs, and wait for what runs then."""
    live, other = pipelines
    agreement = Agreement(rules or Rules())
    async with kind(live.bus(), other.bus(), ShadowLimits(**{"fraction": 1.0, **limits}), agreement) as shadow:
        yield agreement
        await asyncio.sleep(0.05)
        await shadow.settle(10.0)
        assert shadow.num_open == 0


def named(label: str, number: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(model="smol", prompt="Hello", max_tokens=6, request_id=f"{label}-{n}") for n in range(number)
    ]


async def test_everything_agrees_unseeded_choices_and_the_cancelled_included(pipelines):
    story = GenerateRequest(model="smol", prompt="Once upon", max_tokens=4000, ignore_eos=True)
    requests = varied_requests(chat=False)
    async with shadowing(pipelines) as agreement:
        await asyncio.gather(send_all(pipelines[0].bus(), requests), send_and_leave(pipelines[0].bus(), story, 3))
    found = as_json(agreement)
    assert (found["equal"], found["num_agreed"], found["differences"]) == (True, len(requests) + 1, [])
    assert (found["num_ended_by_time"], found["token_share"]) == (1, 1.0)
    assert set(found["end_to_end_s"]["live"]) == {"p50", "p90", "p99"}


async def test_ids_decide_what_is_mirrored(pipelines):
    requests = named("part", 40)
    async with shadowing(pipelines, fraction=0.3) as agreement:
        await send_all(pipelines[0].bus(), requests)
    chosen = [request for request in requests if is_chosen(request.request_id, 0.3)]
    assert 4 < len(chosen) < 20
    assert agreement.num_compared == len(chosen)


def test_fractions_are_nested_and_have_their_size():
    names = [f"req-{number}" for number in range(4000)]
    tenth, half = ({name for name in names if is_chosen(name, part)} for part in (0.1, 0.5))
    assert tenth < half
    assert abs(len(tenth) - 400) < 80
    assert abs(len(half) - 2000) < 150
    assert not any(is_chosen(name, 0.0) for name in names)
    assert all(is_chosen(name, 1.0) for name in names)


async def test_a_shadow_that_is_behind_drops_and_counts(pipelines):
    async with shadowing(pipelines, max_open=1) as agreement:
        await send_all(pipelines[0].bus(), named("burst", 30), at_a_time=30)
    assert agreement.dropped["behind"] > 0
    assert agreement.num_compared + agreement.num_dropped == 30
    assert agreement.verdicts["different"] == 0


async def test_a_plain_client_without_an_id_is_mirrored(pipelines):
    bus = pipelines[0].bus()
    async with shadowing(pipelines) as agreement:
        ended = asyncio.Event()
        await bus.transport.subscribe("_INBOX.me", lambda raw: ended.set() if b'"final":true' in raw.body else None)
        await bus.transport.publish(bus.subjects.generate("smol"), b'{"prompt":"Hi","max_tokens":5}', {}, "_INBOX.me")
        await asyncio.wait_for(ended.wait(), 5)
    assert agreement.verdicts["agreed"] == 1


async def test_a_request_that_is_repeated_or_refused_is_not_mirrored_again(pipelines):
    live, (request,) = pipelines[0].bus(), named("again", 1)
    async with shadowing(pipelines) as agreement:
        await send_all(live, [request])
        await send_all(live, [request, request.model_copy(update={"resume": True})])
        await send_all(live, [GenerateRequest(model="smol", request_id="wrong")])
    assert (agreement.num_compared, agreement.num_dropped) == (1, 0)


async def test_a_second_pipeline_that_is_gone_costs_the_client_nothing(pipelines, monkeypatch):
    monkeypatch.setattr(mirror, "ACCEPT_TIMEOUT_S", 0.2)
    await pipelines[1].retire("tokenizer-0")
    async with shadowing(pipelines) as agreement, generate(pipelines[0].bus(), named("alone", 1)[0]) as stream:
        assert [chunk.final async for chunk in stream][-1]
    assert dict(agreement.dropped) == {"service_unavailable": 1}


async def test_what_takes_too_long_is_dropped(pipelines):
    story = GenerateRequest(model="smol", prompt="Once upon", max_tokens=4000, ignore_eos=True)
    async with shadowing(pipelines, limit_s=0.2) as agreement:
        await send_and_leave(pipelines[0].bus(), story, 300)
    assert dict(agreement.dropped) == {"too slow": 1}


class AskingOtherwise(Shadow):
    """A shadow that asks the other pipeline for one token less: what a changed pipeline would answer."""

    def _request(self, live):
        return super()._request(live).model_copy(update={"max_tokens": 5})


@pytest.mark.parametrize("is_same_engine", [True, False])
async def test_another_answer_is_different_and_between_two_engines_unpromised(pipelines, is_same_engine):
    rules = Rules(is_same_engine=is_same_engine)
    async with shadowing(pipelines, kind=AskingOtherwise, rules=rules) as agreement:
        await send_all(pipelines[0].bus(), named("otherwise", 1))
    verdict = "different" if is_same_engine else "unpromised"
    assert (agreement.verdicts[verdict], agreement.num_tokens_agreed, agreement.num_tokens) == (1, 5, 6)
    assert as_json(agreement)["equal"] is not is_same_engine
    assert agreement.differences[0].position == 5
    assert dict(as_rows(agreement, 0))[verdict].startswith("1 of 1")
