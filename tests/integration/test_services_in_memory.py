"""The path of a request through the real services over the bus in memory, and what comes of it when one is replaced."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from schemas.cache import CacheCommand
from schemas.control import Role
from schemas.errors import ContextLengthExceeded
from schemas.generation import GenerateRequest
from schemas.step import StepPlan
from services.cache_manager import service as cache_manager_service
from services.runtime import generation
from services.runtime.generation import finish_cancelling, generate
from services.runtime.telemetry import Tracing
from services.runtime.transport import RawMessage
from services.scheduler import service as scheduler_service
from services.scheduler import session
from tests.integration.services_in_memory import Answer, Deployment, ask, deployed, echo_of

Eventually = Callable[..., Awaitable[None]]
PROMPT = "The quick brown fox. "


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that a person would not notice are too long for tests of every failure."""
    monkeypatch.setattr(scheduler_service, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(cache_manager_service, "SWEEP_PERIOD_S", 0.1)
    monkeypatch.setattr(session, "CACHE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(session, "CACHE_RETRY_S", 0.05)
    monkeypatch.setattr(generation, "POLL_S", 0.2)
    monkeypatch.setattr(generation, "CANCEL_PERIOD_S", 0.05)


def check(answer: Answer, prompt: str, num_tokens: int, *, n: int = 1) -> None:
    assert answer.error is None
    assert answer.num_final == 1
    expected = echo_of(prompt, num_tokens)
    assert answer.text == dict.fromkeys(range(n), expected)
    assert answer.tokens == dict.fromkeys(range(n), list(expected.encode()))
    assert answer.ends == dict.fromkeys(range(n), "length")


def is_idle(deployment: Deployment) -> bool:
    """Nothing waits, runs, is leased or is left in the queue."""
    loads = [instance.load for instance in deployment.instances.values()]
    gauges = ("num_requests_running", "num_requests_waiting", "num_outputs")
    num_held = sum(load.get("num_blocks", 0) - load.get("num_free_blocks", 0) for load in loads)
    work = deployment.server.stream(deployment.bus().subjects.work_stream)
    books = [i.service._book.requests for i in deployment.instances.values() if i.role == "scheduler"]
    is_quiet = not any(load.get(gauge) for load in loads for gauge in gauges)
    return is_quiet and num_held == 0 and not work.entries and not any(books)


class Traffic:
    """Counts what is said on the bus."""

    def __init__(self, deployment: Deployment) -> None:
        self.num_commands = 0
        self.num_steps = 0
        self.num_resumed = 0
        self.executors: set[str] = set()
        self.deployment = deployment

    async def listen(self) -> "Traffic":
        bus = self.deployment.bus()
        await bus.subscribe(bus.subjects.cache("smol"), CacheCommand, lambda incoming: self.count_command())
        await bus.subscribe(
            "test.v1.exec.*.plan", StepPlan, lambda incoming: self.count(incoming.message, incoming.subject)
        )
        return self

    def count_command(self) -> None:
        self.num_commands += 1

    def count(self, plan: StepPlan, subject: str) -> None:
        self.num_steps += 1
        self.executors |= {subject} if plan.run else set()
        self.num_resumed += sum(len(new.token_ids) > new.prompt_len for new in plan.new)


# ---- undisturbed


async def test_stream_says_what_it_must(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing) as deployment:
        check(await ask(deployment, PROMPT, max_tokens=50), PROMPT, 50)
        check(await ask(deployment, PROMPT, max_tokens=1), PROMPT, 1)
        check(await ask(deployment, "x", max_tokens=33, n=3), "x", 33, n=3)
        await eventually(lambda: is_idle(deployment))


async def test_stop_string_ends_the_stream_and_the_work(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing) as deployment:
        answer = await ask(deployment, PROMPT, max_tokens=4000, stop=("brown",))
        assert answer.text == {0: "The quick "}
        assert answer.ends == {0: "stop"}
        await eventually(lambda: is_idle(deployment))


async def test_logprobs_come_with_every_token(tracing: Tracing) -> None:
    async with deployed(tracing) as deployment:
        answer = await ask(deployment, PROMPT, max_tokens=20, logprobs=1)
        assert answer.num_logprobs == 20


@pytest.mark.parametrize("prompt_len", [15, 16, 17, 32, 48])
async def test_prompts_around_a_whole_number_of_blocks(tracing: Tracing, prompt_len: int) -> None:
    prompt = (PROMPT * 3)[:prompt_len]
    async with deployed(tracing, scheduler={"max_num_batched_tokens": 16}) as deployment:
        answers = await asyncio.gather(*(ask(deployment, prompt, max_tokens=m) for m in (1, 16, 17, 33)))
        for num_tokens, answer in zip((1, 16, 17, 33), answers, strict=True):
            check(answer, prompt, num_tokens)


async def test_32_streams_at_once(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing) as deployment:
        jobs = [(f"{number}:{PROMPT}", 20 + number) for number in range(32)]
        answers = await asyncio.gather(*(ask(deployment, prompt, max_tokens=size) for prompt, size in jobs))
        for (prompt, size), answer in zip(jobs, answers, strict=True):
            check(answer, prompt, size)
        await eventually(lambda: is_idle(deployment))


async def test_two_executors_share_the_load(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing, executors=2, scheduler={"max_num_seqs": 4}) as deployment:
        scheduler = deployment.instances["scheduler-0"]
        await eventually(lambda: scheduler.load["num_executors"] == 2)
        traffic = await Traffic(deployment).listen()
        answers = await asyncio.gather(*(ask(deployment, PROMPT, max_tokens=60) for _ in range(8)))
        for answer in answers:
            check(answer, PROMPT, 60)
        assert len(traffic.executors) == 2
        await eventually(lambda: is_idle(deployment))


async def test_higher_priority_jumps_the_queue(tracing: Tracing) -> None:
    async with deployed(tracing, scheduler={"max_num_seqs": 1}) as deployment:
        order: list[str] = []

        async def one(name: str, **options: Any) -> None:
            check(await ask(deployment, PROMPT, max_tokens=40, **options), PROMPT, 40)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(one(f"normal-{number}"))
                await asyncio.sleep(0.01)
            group.create_task(one("high", priority="high"))
        assert order == ["normal-0", "high", "normal-1", "normal-2", "normal-3"]


async def test_pool_far_too_small_for_8_long_requests(tracing: Tracing, eventually: Eventually) -> None:
    executor = {"num_blocks": 16, "step_time_s": 0.0}
    async with deployed(tracing, executor=executor) as deployment:
        traffic = await Traffic(deployment).listen()
        jobs = [(f"{number}{PROMPT}", 150 + number) for number in range(8)]
        answers = await asyncio.gather(*(ask(deployment, prompt, max_tokens=size) for prompt, size in jobs))
        for (prompt, size), answer in zip(jobs, answers, strict=True):
            check(answer, prompt, size)
        assert traffic.num_resumed > 0
        assert traffic.num_commands < traffic.num_steps, "the cache manager is asked more than once per step"
        await eventually(lambda: is_idle(deployment))


# ---- ends before the end


async def test_leaving_early_frees_everything_within_a_second(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing, scheduler={"max_num_seqs": 2}) as deployment:

        async def leave() -> None:
            request = GenerateRequest(model="smol", prompt=PROMPT, max_tokens=4000)
            async with generate(deployment.bus(), request) as stream:
                async for _ in stream:
                    break

        async def give_up() -> None:
            request = GenerateRequest(model="smol", prompt=PROMPT, max_tokens=4000, n=3)
            async with generate(deployment.bus(), request):
                await asyncio.sleep(0.05)  # it waits in the queue

        await asyncio.gather(leave(), leave(), give_up(), give_up())
        left_s = time.monotonic()
        await eventually(lambda: is_idle(deployment))
        assert time.monotonic() - left_s < 1
        await finish_cancelling()
        check(await ask(deployment, PROMPT, max_tokens=5), PROMPT, 5)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
async def test_deadline_ends_running_and_waiting_requests(
    tracing: Tracing, eventually: Eventually, max_num_seqs: int
) -> None:
    async with deployed(tracing, scheduler={"max_num_seqs": max_num_seqs}) as deployment:
        answers = await asyncio.gather(*(ask(deployment, PROMPT, max_tokens=4000, timeout_s=0.3) for _ in range(3)))
        assert [answer.error for answer in answers] == ["deadline_exceeded"] * 3
        assert [answer.num_final for answer in answers] == [1] * 3
        await eventually(lambda: is_idle(deployment))


async def test_request_for_an_executor_that_is_gone_waits_for_the_next_one(tracing: Tracing) -> None:
    async with deployed(tracing) as deployment:
        await deployment.retire("executor-0")
        asking = asyncio.create_task(ask(deployment, PROMPT, max_tokens=20))
        await asyncio.sleep(0.3)
        await deployment.start("executor", "executor-1")
        check(await asking, PROMPT, 20)


async def test_request_too_long_for_every_executor_fails_alone(tracing: Tracing) -> None:
    async with deployed(tracing, executor={"num_blocks": 4}) as deployment:
        with pytest.raises(ContextLengthExceeded):
            await ask(deployment, PROMPT, max_tokens=100)
        await deployment.retire("executor-0")  # now the tokenizer cannot know
        asking = asyncio.create_task(ask(deployment, PROMPT, max_tokens=100))
        await asyncio.sleep(0.1)
        await deployment.start("executor", "executor-1")
        assert (await asking).error == "context_length_exceeded"
        check(await ask(deployment, PROMPT, max_tokens=20), PROMPT, 20)


# ---- replaced in mid-stream

NUM_TOKENS = 250


async def disturbed(deployment: Deployment, disturb: Callable[[], Awaitable[None]], num_streams: int = 4) -> None:
    """Let streams begin, disturb, and check that each ends as if nothing had been."""
    begun: set[int] = set()
    ready = asyncio.Event()

    def seen(number: int, answer: Answer) -> None:
        if len(answer.tokens.get(0, ())) >= 5:
            begun.add(number)
        if len(begun) == num_streams:
            ready.set()

    prompts = [f"{number} {PROMPT}" for number in range(num_streams)]
    tasks = [
        asyncio.create_task(ask(deployment, prompt, max_tokens=NUM_TOKENS, seen=lambda a, n=n: seen(n, a), logprobs=0))
        for n, prompt in enumerate(prompts)
    ]
    await asyncio.wait({asyncio.create_task(ready.wait()), *tasks}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert not any(task.done() for task in tasks), "too late to disturb"
    await disturb()
    for prompt, answer in zip(prompts, await asyncio.gather(*tasks), strict=True):
        check(answer, prompt, NUM_TOKENS)
        assert answer.num_logprobs == NUM_TOKENS


@pytest.mark.parametrize("way", ["kill", "retire"])
@pytest.mark.parametrize("replacement", ["same name", "another name"])
@pytest.mark.parametrize("role", ["scheduler", "executor", "cache_manager", "tokenizer"])
async def test_service_replaced_in_mid_stream(
    tracing: Tracing, eventually: Eventually, role: Role, replacement: str, way: str
) -> None:
    async with deployed(tracing) as deployment:

        async def replace() -> None:
            await (deployment.kill if way == "kill" else deployment.retire)(f"{role}-0")
            await deployment.start(role, f"{role}-0" if replacement == "same name" else f"{role}-1")

        started_s = time.monotonic()
        await disturbed(deployment, replace)
        assert time.monotonic() - started_s < 60
        await eventually(lambda: is_idle(deployment))


async def test_standby_scheduler_takes_over_and_the_old_one_cannot_interfere(
    tracing: Tracing, eventually: Eventually
) -> None:
    async with deployed(tracing) as deployment:
        await deployment.start("scheduler", "scheduler-1")
        await disturbed(deployment, lambda: deployment.kill("scheduler-0"))
        await eventually(lambda: is_idle(deployment))


async def test_one_of_two_executors_dies(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing, executors=2) as deployment:
        scheduler = deployment.instances["scheduler-0"]
        await eventually(lambda: scheduler.load["num_executors"] == 2)
        await disturbed(deployment, lambda: deployment.kill("executor-1"), num_streams=6)
        await eventually(lambda: scheduler.load["num_executors"] == 1 and is_idle(deployment))


async def test_second_tokenizer_goes_on_for_the_first(tracing: Tracing, eventually: Eventually) -> None:
    async with deployed(tracing) as deployment:
        await deployment.start("tokenizer", "tokenizer-1")
        await disturbed(deployment, lambda: deployment.kill("tokenizer-0"))
        await eventually(lambda: is_idle(deployment))


async def test_stop_string_survives_a_new_scheduler(tracing: Tracing, eventually: Eventually) -> None:
    prompt = "".join(f"{number}," for number in range(100))
    async with deployed(tracing) as deployment:
        seen = asyncio.Event()
        asking = asyncio.create_task(
            ask(deployment, prompt, max_tokens=4000, stop=("87,88",), seen=lambda answer: seen.set())
        )
        await seen.wait()
        await deployment.kill("scheduler-0")
        await deployment.start("scheduler", "scheduler-0")
        answer = await asking
        assert (answer.error, answer.ends) == (None, {0: "stop"})
        assert answer.text[0] == prompt.partition("87,88")[0]
        await eventually(lambda: is_idle(deployment))


async def test_messages_are_lost_all_the_time(
    tracing: Tracing, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in 40 plans, results, token batches and feedbacks never arrives."""
    async with deployed(tracing) as deployment:
        deliver, count = deployment.server.deliver, 0

        def lose_some(message: RawMessage) -> int:
            nonlocal count
            if any(part in message.subject for part in (".plan", ".result", ".detok.", ".feedback.")):
                count += 1
                if count % 40 == 0:
                    return 1
            return deliver(message)

        monkeypatch.setattr(deployment.server, "deliver", lose_some)
        jobs = [(f"{number}{PROMPT}", 60) for number in range(6)]
        answers = await asyncio.gather(*(ask(deployment, prompt, max_tokens=size) for prompt, size in jobs))
        for (prompt, size), answer in zip(jobs, answers, strict=True):
            check(answer, prompt, size)
        await eventually(lambda: is_idle(deployment))
