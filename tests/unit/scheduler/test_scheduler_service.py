"""The scheduler alone on the bus, between a scripted executor, a real block pool and a tokenizer that only listens."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from schemas.cache import CacheCommand, CacheReply
from schemas.control import Cancel, DeadLetter, Registration
from schemas.errors import InvalidRequest, NatterjackError, PayloadTooLarge, StaleEpoch
from schemas.generation import WorkItem
from schemas.output import ChoiceDelta, Feedback, OutputChunk, OutputFeedback, TokenBatch
from schemas.step import SampledToken, StepPlan, StepResult
from schemas.subjects import Subjects, subject_token
from services.cache_manager.pools import Pools
from services.runtime.bus import Bus, Incoming
from services.runtime.memory_transport import MemoryServer
from services.runtime.registry import Heartbeat, Registry
from services.runtime.service import Context
from services.runtime.settings import BusSettings
from services.runtime.streams import ensure_streams, work_consumer
from services.runtime.telemetry import Tracing
from services.runtime.transport import MESSAGE_ID_HEADER
from services.scheduler import service as service_module
from services.scheduler import session as session_module
from services.scheduler import unanswered
from services.scheduler.custody import MAX_RESTARTS
from services.scheduler.intake import EPOCHS_PER_DELIVERY
from services.scheduler.service import SchedulerService
from services.scheduler.settings import Settings
from tests.integration.services_in_memory import YieldingTransport
from tests.unit.scheduler.scheduling_traffic import capacity, work

Eventually = Callable[..., Awaitable[None]]


class Surroundings:
    """Everything that the scheduler talks to."""

    def __init__(self, bus: Bus, tracing: Tracing) -> None:
        self.bus = bus
        self.tracing = tracing
        self.pools = Pools()
        self.refusals: list[NatterjackError] = []
        self.batches: list[TokenBatch] = []
        self.plans: list[StepPlan] = []
        self.answer: Callable[[StepPlan], StepResult | None] = lambda plan: None
        self.sending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        subjects = self.bus.subjects
        await self.bus.serve(subjects.cache("smol"), CacheCommand, self.command)
        await self.bus.subscribe(subjects.detok("tokenizer-0"), TokenBatch, lambda i: self.batches.append(i.message))
        await self.bus.subscribe(subjects.plan("executor-0"), StepPlan, self.plan)

    async def command(self, incoming: Incoming[CacheCommand]) -> CacheReply:
        if self.refusals:
            raise self.refusals.pop()
        return self.pools.apply(incoming.message)

    def plan(self, incoming: Incoming[StepPlan]) -> None:
        self.plans.append(incoming.message)
        if (result := self.answer(incoming.message)) is not None:
            task = asyncio.create_task(self.bus.publish(self.bus.subjects.result("executor-0"), result))
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)

    async def register(self, name: str, role: Any, **changes: Any) -> None:
        entry = Registration(
            instance=name, incarnation="life-1", role=role, model="smol", state="ready", heartbeat_s=60.0, **changes
        )
        await self.bus.kv_put(self.bus.subjects.registry, subject_token(name), entry)

    async def executor(self, **changes: Any) -> None:
        await self.register("executor-0", "executor", capacity=capacity(), **changes)

    async def submit(self, *items: WorkItem) -> None:
        for item in items:
            await self.bus.append(self.bus.subjects.work("smol", item.priority), item, message_id=item.request_id)

    async def log(self, *chunks: OutputChunk) -> None:
        for chunk in chunks:
            await self.bus.append(self.bus.subjects.out(chunk.request_id), chunk)

    async def tell(self, *items: Feedback) -> None:
        message = OutputFeedback(tokenizer="tokenizer-0", items=items)
        await self.bus.publish(self.bus.subjects.feedback("scheduler-0"), message)

    async def num_queued(self) -> int:
        return await self.bus.transport.num_messages(self.bus.subjects.work_stream)

    async def dead_letters(self) -> list[DeadLetter]:
        subjects = self.bus.subjects
        return [stored.message for stored in await self.bus.read(subjects.dead_stream, subjects.dead_all, DeadLetter)]

    def errors(self) -> dict[str, str]:
        return {failure.request_id: failure.error.code for batch in self.batches for failure in batch.failed}

    def opened(self) -> list[tuple[int, bool]]:
        return [(opened.epoch, opened.resume) for batch in self.batches for opened in batch.opened]


@pytest.fixture
async def around(tracing: Tracing, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    monkeypatch.setattr(service_module, "CHECK_PERIOD_S", 0.02)
    monkeypatch.setattr(session_module, "CACHE_RETRY_S", 0.02)
    bus = Bus(YieldingTransport(MemoryServer()), Subjects("test"), tracing)
    await ensure_streams(bus.transport, bus.subjects, BusSettings())
    around = Surroundings(bus, tracing)
    await around.open()
    await around.register("tokenizer-0", "tokenizer")
    return around


Start = Callable[..., Awaitable[SchedulerService]]


@pytest.fixture
async def start(around: Surroundings) -> AsyncIterator[Start]:
    """Start the scheduler: `await start(max_waiting=1)`."""
    services: list[SchedulerService] = []
    registries: list[Registry] = []

    async def start_service(**changes: Any) -> SchedulerService:
        bus = around.bus
        own = Registration(instance="scheduler-0", incarnation="life-1", role="scheduler", model="smol", state="ready")
        registries.append(await Registry(bus).__aenter__())
        context = Context(bus, around.tracing, registries[-1], Heartbeat(bus, own))
        services.append(
            SchedulerService(Settings.model_validate({"scheduler": {"output_timeout_s": 5.0, **changes}}), context)
        )
        await services[-1].start()
        return services[-1]

    yield start_service
    for service in services:
        await service.stop()
    for registry in registries:
        await registry.__aexit__()


def say(token: int = 9, **changes: Any) -> Callable[[StepPlan], StepResult]:
    """Answer every plan with a token for each run that is not a dropped one's."""
    lengths: dict[tuple[int, int], int] = {}

    def answer(plan: StepPlan) -> StepResult:
        for new in plan.new:
            lengths[plan.epoch, new.sequence] = len(new.token_ids)
        sampled = []
        for run in plan.run:
            position = lengths[plan.epoch, run.sequence]
            lengths[plan.epoch, run.sequence] += 1
            sampled.append(SampledToken(sequence=run.sequence, position=position, token=token, **changes))
        return StepResult(executor="executor-0", epoch=plan.epoch, step=plan.step, sampled=tuple(sampled))

    return answer


def refuse(plan: StepPlan) -> StepResult:
    return StepResult(executor="executor-0", epoch=plan.epoch, step=plan.step, fault="a step is missing")


# ---- requests in


async def test_unreadable_work_becomes_a_dead_letter(around: Surroundings, start: Start) -> None:
    await around.bus.transport.append(around.bus.subjects.work("smol", "normal"), b"{", {})
    await start()
    await asyncio.sleep(0.05)
    assert await around.num_queued() == 0
    [letter] = await around.dead_letters()
    assert (letter.work, letter.body) == (None, "{")


async def test_client_of_unreadable_work_is_told(around: Surroundings, start: Start, eventually: Eventually) -> None:
    """The id is in the queue's header as well."""
    headers = {MESSAGE_ID_HEADER: subject_token("req 1")}
    await around.bus.transport.append(around.bus.subjects.work("smol", "normal"), b"{", headers)
    service = await start()
    await eventually(lambda: around.errors() == {"req 1": "internal_error"})
    request = service._book.get("req 1")
    assert request is not None
    await around.tell(Feedback(request_id="req 1", epoch=request.epoch, event="stored"))
    await eventually(lambda: service._book.get("req 1") is None)
    assert await around.num_queued() == 0


async def test_scheduler_without_executors_leaves_the_work_to_one_that_has_some(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    service = await start()
    await around.submit(work("held"))
    await eventually(lambda: service._book.get("held") is not None)
    await around.register("scheduler-1", "scheduler", load={"num_executors": 1})
    await eventually(lambda: service._book.get("held") is None)
    await around.submit(work("new"))
    await asyncio.sleep(0.1)
    assert service._book.get("new") is None
    assert await around.num_queued() == 2


async def test_plan_that_was_lost_with_nothing_to_follow_it_is_sent_again(
    around: Surroundings, start: Start, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unanswered, "MIN_PATIENCE_S", 0.05)
    service = await start()
    await around.executor()
    await around.submit(work(max_tokens=1))
    await eventually(lambda: len(around.plans) >= 2)
    assert around.plans[0] == around.plans[1]
    around.answer = say()
    await eventually(lambda: any(batch.tokens for batch in around.batches))
    assert service._sessions["executor-0"].state is not None
    assert service._sessions["executor-0"].state.epoch == around.plans[0].epoch


async def test_only_as_much_is_pulled_as_may_wait(around: Surroundings, start: Start, eventually: Eventually) -> None:
    service = await start(max_waiting=2)
    await around.submit(*(work(f"r{number}") for number in range(5)))
    await eventually(lambda: service._load()["num_requests_waiting"] == 2)
    await asyncio.sleep(0.05)
    assert service._load()["num_requests_waiting"] == 2
    await around.bus.publish(around.bus.subjects.cancel("r0"), Cancel(request_id="r0"))
    await eventually(lambda: around.errors() == {"r0": "cancelled"})
    await eventually(lambda: service._book.get("r2") is not None)


async def test_what_ends_before_it_begins_is_told(around: Surroundings, start: Start, eventually: Eventually) -> None:
    await start()
    await around.bus.publish(around.bus.subjects.cancel("early"), Cancel(request_id="early"))
    await asyncio.sleep(0.02)
    await around.submit(work("early"), work("late", deadline_s=1.0))
    await eventually(lambda: around.errors() == {"early": "cancelled", "late": "deadline_exceeded"})
    await around.bus.publish(around.bus.subjects.cancel("early"), Cancel(request_id="early"))  # once more: harmless
    await around.tell(*(Feedback(request_id=name, epoch=1, event="stored") for name in ("early", "late")))
    await asyncio.sleep(0.05)
    assert await around.num_queued() == 0


async def deliver(around: Surroundings, item: WorkItem, times: int) -> None:
    """Let another scheduler take the item, and die, so many times."""
    await around.submit(item)
    bus = around.bus
    await bus.transport.ensure_consumer(
        work_consumer(bus.subjects, "smol", "normal", 30.0),
    )
    for _ in range(times):
        [delivery] = await bus.fetch(
            bus.subjects.work_stream, bus.subjects.work_consumer("smol", "normal"), WorkItem, batch=1, timeout_s=1.0
        )
        await bus.settle(delivery, "retry")


def chunk(*deltas: ChoiceDelta, final: bool = False, epoch: int = 1) -> OutputChunk:
    return OutputChunk(request_id="r", model="smol", created_s=0.0, epoch=epoch, choices=deltas, final=final)


async def test_complete_request_is_only_acknowledged(around: Surroundings, start: Start) -> None:
    await deliver(around, work(), 1)
    await around.log(chunk(ChoiceDelta(token_ids=(1,), finish_reason="stop"), final=True))
    await start()
    await asyncio.sleep(0.1)
    assert await around.num_queued() == 0
    assert around.batches == []


async def test_resumed_at_the_limit_has_only_its_end_to_tell(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    await deliver(around, work(max_tokens=2), 1)
    await around.log(chunk(ChoiceDelta(token_ids=(7, 8)), epoch=3))
    await start()
    await eventually(lambda: around.batches)
    assert around.opened() == [(EPOCHS_PER_DELIVERY + 1, True)]
    [news] = around.batches[0].tokens
    assert (news.start, news.token_ids, news.finish_reason) == (2, (), "length")


async def test_given_up_after_too_many_deliveries(around: Surroundings, start: Start, eventually: Eventually) -> None:
    await deliver(around, work(), 3)
    await start(max_deliver=3)
    await eventually(lambda: around.errors() == {"r": "internal_error"})


async def test_redelivery_to_ourselves_starts_nothing_twice(
    around: Surroundings, start: Start, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "CHECK_PERIOD_S", 0.5)
    service = await start(request_ack_wait_s=0.05)
    await around.submit(work())
    await eventually(lambda: service._book.get("r") is not None)
    request = service._book.get("r")
    assert request is not None
    first = request.handle
    await eventually(lambda: request.handle is not first)
    assert service._book.get("r") is request


async def test_log_that_cannot_be_read_ends_the_request_with_an_error_and_a_dead_letter(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    await deliver(around, work(), 1)
    await around.bus.transport.append(around.bus.subjects.out("r"), b"{", {})
    await around.submit(work("other"))
    service = await start()
    await eventually(lambda: service._book.get("other") is not None)
    await eventually(lambda: around.errors() == {"r": "internal_error"})
    assert around.opened() == [(2 * EPOCHS_PER_DELIVERY, True)]
    [letter] = await around.dead_letters()
    assert (letter.request_id, letter.num_delivered, letter.work) == ("r", 2, work())
    assert "cannot be read" in letter.reason


async def test_fenced_request_is_let_go_but_not_acknowledged(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    service = await start()
    await around.submit(work())
    await eventually(lambda: service._book.get("r") is not None)
    await around.tell(Feedback(request_id="r", epoch=7, event="fenced"))  # not of this epoch
    await asyncio.sleep(0.02)
    assert service._book.get("r") is not None
    await around.tell(Feedback(request_id="r", epoch=1, event="fenced"))
    await eventually(lambda: service._book.get("r") is None)
    assert await around.num_queued() == 1


# ---- outputs


async def test_lost_output_is_opened_again_with_everything(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    around.answer = say()
    await around.executor()
    await start()
    await around.submit(work(max_tokens=200))
    await eventually(lambda: sum(len(batch.tokens) for batch in around.batches) > 3)
    await around.tell(*[Feedback(request_id="r", epoch=1, event="lost")] * 3)
    await eventually(lambda: len(around.opened()) == 2)
    assert around.opened() == [(1, False), (2, True)]
    [again] = [news for batch in around.batches for news in batch.tokens if news.epoch == 2 and news.start == 0]
    assert len(again.token_ids) > 3


async def test_output_of_a_dead_tokenizer_moves_once(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    around.answer = say()
    await around.executor()
    await start()
    await around.submit(work(max_tokens=200))
    await eventually(lambda: around.batches)
    moved: list[TokenBatch] = []
    subject = around.bus.subjects.detok("tokenizer-1")
    await around.bus.subscribe(subject, TokenBatch, lambda incoming: moved.append(incoming.message))
    await around.register("tokenizer-1", "tokenizer")
    await around.bus.kv_delete(around.bus.subjects.registry, "tokenizer-0")
    await eventually(lambda: moved)
    assert [opened.epoch for batch in moved for opened in batch.opened] == [2]


async def test_silent_tokenizer_is_asked_again(around: Surroundings, start: Start, eventually: Eventually) -> None:
    await start(output_timeout_s=0.05)
    await around.submit(work(deadline_s=1.0))
    await eventually(lambda: len(around.opened()) >= 3)
    assert around.opened()[:3] == [(1, False), (2, True), (3, True)]


async def test_values_that_are_not_finite_fail_the_request_alone(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    around.answer = say(-1, finish_reason="error")
    await around.executor()
    service = await start()
    await around.submit(work())
    await eventually(lambda: around.errors() == {"r": "internal_error"})
    around.answer = say()
    await around.submit(work("next", max_tokens=200))
    await eventually(lambda: service._load()["num_requests_running"] == 1)


# ---- executors


async def test_new_epoch_begins_at_once_after_a_fault(
    around: Surroundings, start: Start, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "CHECK_PERIOD_S", 30.0)
    around.answer = lambda plan: refuse(plan) if plan.step == 1 and len(around.plans) == 1 else None
    await around.executor()
    await start()
    await around.submit(work())
    began_s = time.monotonic()
    await eventually(lambda: len({plan.epoch for plan in around.plans}) == 2)
    assert time.monotonic() - began_s < 1
    assert around.plans[-1].epoch > around.plans[0].epoch


async def test_executor_that_always_refuses_is_given_up(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    around.answer = refuse
    await around.executor()
    await start()
    await around.submit(work())
    await eventually(lambda: around.errors() == {"r": "internal_error"})
    assert len({plan.epoch for plan in around.plans}) == MAX_RESTARTS + 1


async def test_losses_between_which_tokens_come_are_not_counted_together(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    speak = say()
    around.answer = lambda plan: refuse(plan) if plan.step % 2 == 0 else speak(plan)
    await around.executor()
    await start()
    await around.submit(work(max_tokens=100))
    await eventually(lambda: len({plan.epoch for plan in around.plans}) > MAX_RESTARTS + 3)
    assert around.errors() == {}


async def test_step_without_an_answer_ends_the_epoch(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    await around.executor()
    await start(step_timeout_s=0.05, lease_s=0.1)
    await around.submit(work())
    await eventually(lambda: len({plan.epoch for plan in around.plans}) >= 2)


@pytest.mark.parametrize(
    "refusal", [InvalidRequest("overlap"), StaleEpoch("owned by another")], ids=["invalid", "stale"]
)
async def test_refused_cache_command_ends_the_epoch(
    around: Surroundings, start: Start, eventually: Eventually, refusal: NatterjackError
) -> None:
    around.refusals = [refusal]
    around.answer = say()
    await around.executor()
    await start()
    await around.submit(work(max_tokens=200))
    await eventually(lambda: around.batches)
    assert around.plans[0].epoch > 1


async def test_silent_cache_manager_is_waited_for(
    around: Surroundings, start: Start, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    around.refusals = [NatterjackError("away")] * 2
    around.answer = say()
    await around.executor()
    await start()
    await around.submit(work(max_tokens=200))
    await eventually(lambda: around.batches)
    assert caplog.text.count("does not answer") == 2
    assert {plan.epoch for plan in around.plans} == {1}


async def test_lost_lease_is_noticed_and_the_sequences_wait(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    around.answer = say()
    await around.executor()
    service = await start(lease_s=0.1)
    await around.submit(work(max_tokens=200))
    await eventually(lambda: around.plans)
    await around.bus.kv_delete(around.bus.subjects.leases, "executor-0")
    await eventually(lambda: len({plan.epoch for plan in around.plans}) == 2 or not service._book.num_running)


async def test_queue_span_is_recorded_under_the_request(
    around: Surroundings, start: Start, eventually: Eventually, span_exporter: Any
) -> None:
    around.answer = say()
    await around.executor()
    await start()
    with around.tracing.span("client"):
        await around.submit(work())
    await eventually(lambda: any(span.name == "scheduler.queue" for span in span_exporter.get_finished_spans()))
    [span] = [span for span in span_exporter.get_finished_spans() if span.name == "scheduler.queue"]
    assert span.attributes["natterjack.request_id"] == "r"


# ---- graceful departures


async def test_graceful_restarts_are_no_failed_attempts(
    around: Surroundings, start: Start, eventually: Eventually
) -> None:
    await around.submit(work())
    for _ in range(4):
        service = await start(max_deliver=2)
        await eventually(lambda service=service: service._book.get("r") is not None)
        await service.drain()
        await service.stop()
    assert around.errors() == {}
    bus = around.bus
    for _ in range(2):  # and now two schedulers die with it
        [delivery] = await bus.fetch(
            bus.subjects.work_stream, bus.subjects.work_consumer("smol", "normal"), WorkItem, batch=1, timeout_s=1.0
        )
        await bus.settle(delivery, "retry")
    await start(max_deliver=2)
    await eventually(lambda: around.errors() == {"r": "internal_error"})
    [letter] = await around.dead_letters()
    assert letter.reason == "Gave up after 2 attempts to serve this request."


async def test_new_sequence_that_no_message_can_hold_fails_alone(
    around: Surroundings, start: Start, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak, heard = say(), set()

    def answer(plan: StepPlan) -> StepResult:
        heard.add((plan.epoch, plan.step))
        return speak(plan) if plan.step == 1 or (plan.epoch, plan.step - 1) in heard else refuse(plan)

    around.answer = answer
    await around.executor()
    await start()
    publish = around.bus.transport.publish

    async def refuse_large(subject: str, body: bytes, *rest: Any) -> None:
        if b'"max_len":205' in body:
            raise PayloadTooLarge("The message is too large.")
        await publish(subject, body, *rest)

    monkeypatch.setattr(around.bus.transport, "publish", refuse_large)
    await around.submit(work("huge", max_tokens=200))
    await eventually(lambda: around.errors() == {"huge": "payload_too_large"})
    await around.submit(work("next", max_tokens=20))
    await eventually(lambda: any(news.request_id == "next" for batch in around.batches for news in batch.tokens))
