"""The tokenizer on the bus, in memory and on a real nats-server, with the test in the scheduler's place."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas.codec import decode
from schemas.control import ExecutorCapacity, Registration
from schemas.errors import (
    ERROR_CODE_HEADER,
    ERROR_HEADER,
    ContextLengthExceeded,
    ErrorReply,
    InvalidParameter,
    QueueFull,
    UnsupportedParameter,
)
from schemas.generation import Accepted, GenerateRequest, WorkItem
from schemas.output import NewTokens, OpenOutput, OutputChunk, OutputFeedback, RequestFailed, TokenBatch
from services.runtime.bus import Bus, Incoming
from services.runtime.generation import generate
from services.runtime.registry import Heartbeat, Registry
from services.runtime.service import Context, StartFailed
from services.runtime.settings import BUILTIN_BYTES, BusSettings
from services.runtime.streams import ensure_streams, work_consumer
from services.runtime.telemetry import Tracing
from services.runtime.transport import RawMessage
from services.tokenizer import template_process
from services.tokenizer.service import TokenizerService
from services.tokenizer.settings import Settings
from tests.unit.tokenizer.gguf_file import string, vocabulary_entries, write

Eventually = Callable[..., Awaitable[None]]
Serve = Callable[..., Awaitable[TokenizerService]]
INSTANCE, SCHEDULER = "tokenizer-0", "scheduler-0"


def registration(role: str, instance: str, **fields: Any) -> Registration:
    return Registration(instance=instance, incarnation="1", role=role, model="smol", state="ready", **fields)


@dataclass
class Scheduler:
    """Plays the scheduler: takes work, sends tokens, hears feedback."""

    bus: Bus
    events: list[str] = field(default_factory=list)

    async def start(self) -> None:
        spec = work_consumer(self.bus.subjects, "smol", "normal", 30.0)
        self.consumer = spec.name
        await self.bus.transport.ensure_consumer(spec)
        await self.bus.subscribe(self.bus.subjects.feedback(SCHEDULER), OutputFeedback, self._hear)
        await self.bus.transport.flush()

    def _hear(self, incoming: Incoming[OutputFeedback]) -> None:
        self.events += [item.event for item in incoming.message.items]

    async def work(self) -> WorkItem:
        [delivery] = await self.bus.fetch(self.bus.subjects.work_stream, self.consumer, WorkItem, batch=1, timeout_s=5)
        await self.bus.settle(delivery, "ack")
        assert delivery.message is not None
        return delivery.message

    async def send(self, *tokens: NewTokens, opened: OpenOutput | None = None, failed: Any = ()) -> None:
        batch = TokenBatch(scheduler=SCHEDULER, opened=(opened,) if opened else (), tokens=tokens, failed=tuple(failed))
        await self.bus.publish(self.bus.subjects.detok(INSTANCE), batch)

    async def answer(self, text: str) -> WorkItem:
        """Answer the next request with `text`, one token a batch."""
        work = await self.work()
        fields: dict[str, Any] = {"request_id": work.request_id, "epoch": 1}
        for start, byte in enumerate(text.encode()):
            opened = OpenOutput(spec=work.output, epoch=1) if start == 0 else None
            await self.send(NewTokens(**fields, start=start, token_ids=(byte,)), opened=opened)
        end = NewTokens(**fields, start=len(text.encode()), token_ids=(256,), finish_reason="stop", stop_token=True)
        await self.send(end)
        return work


@dataclass
class Client:
    """A plain client of the message system, as `nats request --replies=0` is one."""

    bus: Bus
    inbox: str = ""
    received: list[RawMessage] = field(default_factory=list)

    async def ask(self, body: bytes | dict[str, Any]) -> None:
        self.inbox = self.bus.transport.new_inbox()
        await self.bus.transport.subscribe(self.inbox, self.received.append)
        await self.bus.transport.flush()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.bus.transport.publish(self.bus.subjects.generate("smol"), raw, {}, self.inbox)

    @property
    def chunks(self) -> list[OutputChunk]:
        return [decode(OutputChunk, raw.headers, raw.body) for raw in self.received[1:]]

    @property
    def text(self) -> str:
        return "".join(delta.text for chunk in self.chunks for delta in chunk.choices)


@pytest.fixture
async def registry(bus: Bus) -> AsyncIterator[Registry]:
    async with Registry(bus) as view:
        yield view


@pytest.fixture
async def serve(bus: Bus, registry: Registry, tracing: Tracing) -> AsyncIterator[Serve]:
    """Start a tokenizer: `await serve(model={"source": "model.gguf"})`."""
    started: list[TokenizerService] = []

    async def start(**settings: Any) -> TokenizerService:
        chosen = {"model": {"source": BUILTIN_BYTES}, **settings}
        heartbeat = Heartbeat(bus, registration("tokenizer", INSTANCE))
        service = TokenizerService(Settings.model_validate(chosen), Context(bus, tracing, registry, heartbeat))
        await service.start()
        await bus.transport.flush()
        started.append(service)
        return service

    yield start
    for service in started:
        await service.stop()


@pytest.fixture
async def service(serve: Serve) -> TokenizerService:
    return await serve()


@pytest.fixture
async def scheduler(bus: Bus) -> Scheduler:
    scheduler = Scheduler(bus)
    await scheduler.start()
    return scheduler


async def ask(bus: Bus, **fields: Any) -> Accepted:
    request = GenerateRequest.model_validate_json(json.dumps({"prompt": "hi", "deliver": "log", **fields}))
    return await bus.request(bus.subjects.generate("smol"), request, Accepted, timeout_s=5)


async def test_request_is_answered_through_the_log(bus: Bus, service: TokenizerService, scheduler: Scheduler) -> None:
    answering = asyncio.create_task(scheduler.answer("Hello 😀!"))
    async with generate(bus, GenerateRequest(model="smol", prompt="hi")) as generation:
        chunks = [chunk async for chunk in generation]
    work = await answering
    assert "".join(delta.text for chunk in chunks for delta in chunk.choices) == "Hello 😀!"
    assert not any("\ufffd" in delta.text for chunk in chunks for delta in chunk.choices)
    assert [chunk.final for chunk in chunks].count(True) == 1
    assert (work.prompt_token_ids, work.tokenizer, work.output.reply) == ((104, 105), INSTANCE, None)


async def test_accepted_work_is_stored_before_the_reply(bus: Bus, service: TokenizerService) -> None:
    accepted = await ask(bus, request_id="mine")
    assert await bus.transport.num_messages(bus.subjects.work_stream) == 1
    assert (accepted.request_id, accepted.model, accepted.num_prompt_tokens) == ("mine", "smol", 2)


async def test_plain_client_gets_acceptance_then_chunks(
    bus: Bus, service: TokenizerService, scheduler: Scheduler, eventually: Eventually
) -> None:
    client = Client(bus)
    await client.ask({"prompt": "hi"})
    work = await scheduler.answer("Hello")
    await eventually(lambda: len(client.received) > 1 and client.chunks[-1].final)
    accepted = decode(Accepted, client.received[0].headers, client.received[0].body)
    assert accepted.request_id == work.request_id == client.chunks[0].request_id
    assert accepted.created_s == client.chunks[0].created_s
    assert client.text == "Hello"
    assert work.output.reply == client.inbox
    assert [chunk.final for chunk in client.chunks].count(True) == 1


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "malformed_message", None),
        (b"", "malformed_message", None),
        ({"prompt": ""}, "invalid_parameter", "prompt"),
        ({"prompt": "x" * 9000}, "context_length_exceeded", "prompt"),
        ({"prompt": "x", "functions": []}, "unsupported_parameter", "functions"),
        ({"prompt": "x", "model": "y" * 300_000}, "model_not_found", "model"),
        ({"prompt": "x", "stop": ["a"] * 100_000}, "invalid_parameter", "stop"),
        ({"messages": []}, "invalid_parameter", "messages"),
    ],
)
async def test_plain_client_gets_a_coded_error(
    bus: Bus, service: TokenizerService, eventually: Eventually, body: Any, code: str, param: str | None
) -> None:
    client = Client(bus)
    await client.ask(body)
    await eventually(lambda: client.received)
    [reply] = client.received
    error = ErrorReply.model_validate_json(reply.body).error
    assert (error.code, error.param) == (code, param)
    assert reply.headers[ERROR_CODE_HEADER] == ("404" if code == "model_not_found" else "400")
    assert reply.headers[ERROR_HEADER]
    await ask(bus)  # and the next request works
    assert await bus.transport.num_messages(bus.subjects.work_stream) == 1


async def test_repeated_request_finds_the_stored_output(
    bus: Bus, service: TokenizerService, scheduler: Scheduler, eventually: Eventually
) -> None:
    await ask(bus, request_id="again")
    await scheduler.answer("Hello")
    await eventually(lambda: "stored" in scheduler.events)
    async with generate(bus, GenerateRequest(model="smol", prompt="hi", request_id="again")) as generation:
        chunks = [chunk async for chunk in generation]
    assert "".join(delta.text for chunk in chunks for delta in chunk.choices) == "Hello"
    assert await bus.transport.num_messages(bus.subjects.work_stream) == 0
    with pytest.raises(InvalidParameter, match="'again' was used before; read its output from") as raised:
        await ask(bus, request_id="again", deliver="reply")
    assert raised.value.param == "request_id"


async def test_request_repeated_while_it_waits_is_stored_once(bus: Bus, service: TokenizerService) -> None:
    await ask(bus, request_id="a.b/c")
    await ask(bus, request_id="a.b/c")
    assert await bus.transport.num_messages(bus.subjects.work_stream) == 1
    with pytest.raises(InvalidParameter, match="was used before"):
        await ask(bus, request_id="a.b/c", deliver="reply")


@pytest.mark.parametrize("change", [{"prompt": "ho"}, {"n": 2}, {"stop": ["x"]}, {"max_tokens": 3}])
async def test_an_id_whose_request_waits_is_refused_to_another_one(
    bus: Bus, service: TokenizerService, change: dict[str, Any]
) -> None:
    await ask(bus, request_id="taken")
    with pytest.raises(InvalidParameter, match="'taken' was used before, for another request") as raised:
        await ask(bus, request_id="taken", **change)
    assert raised.value.param == "request_id"
    await ask(bus, request_id="taken", timeout_s=9, user="else")  # which ask for nothing else
    assert await bus.transport.num_messages(bus.subjects.work_stream) == 1


@pytest.mark.parametrize("resume", [False, True])
async def test_an_id_with_stored_output_is_refused_to_another_request(
    bus: Bus, service: TokenizerService, scheduler: Scheduler, eventually: Eventually, resume: bool
) -> None:
    await ask(bus, request_id="done")
    await scheduler.answer("Hello")
    await eventually(lambda: "stored" in scheduler.events)
    with pytest.raises(InvalidParameter, match="'done' was used before, for another request"):
        await ask(bus, request_id="done", n=2, resume=resume)
    await ask(bus, request_id="done", resume=resume)


async def test_full_queue_refuses_at_once(bus: Bus, service: TokenizerService) -> None:
    await ensure_streams(bus.transport, bus.subjects, BusSettings(work_max_msgs=2))
    await ask(bus)
    await ask(bus)
    with pytest.raises(QueueFull) as raised:
        await ask(bus)
    assert raised.value.retryable
    assert await bus.transport.num_messages(bus.subjects.work_stream) == 2


async def test_stop_string_and_failure_are_fed_back(
    bus: Bus, service: TokenizerService, scheduler: Scheduler, eventually: Eventually
) -> None:
    await ask(bus, request_id="one", stop="three", n=2)
    work = await scheduler.work()
    fields: dict[str, Any] = {"request_id": "one", "epoch": 1}
    text = tuple(b"one, two, three, four")
    await scheduler.send(NewTokens(**fields, start=0, token_ids=text), opened=OpenOutput(spec=work.output, epoch=1))
    await eventually(lambda: scheduler.events == ["stopped"])
    error = InvalidParameter("something is wrong").body()
    await scheduler.send(failed=[RequestFailed(request_id="one", epoch=1, error=error)])
    await eventually(lambda: scheduler.events == ["stopped", "stored"])
    last = await bus.last(bus.subjects.out_stream, bus.subjects.out("one"), OutputChunk)
    assert last is not None
    assert last.message.error == error
    await scheduler.send(NewTokens(**fields, start=30, token_ids=(1,)))
    await eventually(lambda: scheduler.events == ["stopped", "stored", "lost"])


async def test_output_is_resumed_by_a_tokenizer_that_knows_nothing(
    bus: Bus, serve: Serve, scheduler: Scheduler, eventually: Eventually
) -> None:
    first = await serve()
    await ask(bus, request_id="one")
    work = await scheduler.work()
    fields: dict[str, Any] = {"request_id": "one", "start": 0}
    emoji = tuple("ab😀".encode())
    await scheduler.send(
        NewTokens(**fields, epoch=1, token_ids=emoji[:4]), opened=OpenOutput(spec=work.output, epoch=1)
    )
    await eventually(lambda: first._outputs is not None and len(first._outputs) == 1)
    await first.drain()
    await first.stop()
    await serve()
    tokens = NewTokens(**fields, epoch=2, token_ids=emoji, finish_reason="length")
    await scheduler.send(tokens)
    await eventually(lambda: scheduler.events == ["lost"])
    await scheduler.send(tokens, opened=OpenOutput(spec=work.output, epoch=2, resume=True))
    await eventually(lambda: scheduler.events == ["lost", "stored"])
    stored = await bus.read(bus.subjects.out_stream, bus.subjects.out("one"), OutputChunk)
    deltas = [delta for entry in stored for delta in entry.message.choices]
    assert "".join(delta.text for delta in deltas) == "ab😀"
    assert tuple(token for delta in deltas for token in delta.token_ids) == emoji


async def test_context_is_limited_by_what_the_executors_hold(
    bus: Bus, service: TokenizerService, registry: Registry, eventually: Eventually
) -> None:
    capacity = ExecutorCapacity(
        engine="echo", model_file="", device="cpu", kernels="", vocab_size=257,
        max_model_len=64, block_size=8, num_blocks=4,
    )  # fmt: skip
    await bus.kv_put(bus.subjects.registry, "executor-0", registration("executor", "executor-0", capacity=capacity))
    await eventually(lambda: registry.healthy("executor"))
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 32 tokens") as raised:
        await ask(bus, prompt="x" * 32)
    assert raised.value.details == {"max_model_len": 32, "num_prompt_tokens": 32}


async def test_configured_context_and_long_texts(bus: Bus, serve: Serve, scheduler: Scheduler) -> None:
    await serve(model={"source": BUILTIN_BYTES, "max_model_len": 5000})
    await ask(bus, prompt="x" * 4000)  # long enough to be encoded on a thread
    assert (await scheduler.work()).max_tokens == 1000
    with pytest.raises(ContextLengthExceeded):
        await ask(bus, prompt="x" * 5000)


async def test_beyond_the_concurrency_limit_requests_are_refused(bus: Bus, serve: Serve) -> None:
    await serve(tokenizer={"max_concurrent": 1})
    answers = await asyncio.gather(*(ask(bus) for _ in range(5)), return_exceptions=True)
    assert any(isinstance(answer, Accepted) for answer in answers)
    assert all(isinstance(answer, Accepted | QueueFull) for answer in answers)


async def test_draining_tokenizer_takes_nothing_new(bus: Bus, service: TokenizerService) -> None:
    await service.drain()
    client = Client(bus)
    await client.ask({"prompt": "hi"})
    await asyncio.sleep(0.1)
    assert await bus.transport.num_messages(bus.subjects.work_stream) == 0
    assert not [raw for raw in client.received if ERROR_HEADER not in raw.headers and "Status" not in raw.headers]


async def test_nonsense_on_the_token_subject_harms_nothing(
    bus: Bus, service: TokenizerService, scheduler: Scheduler, eventually: Eventually
) -> None:
    subject = bus.subjects.detok(INSTANCE)
    spec = {"request_id": "x", "model": "smol", "created_s": 1, "num_prompt_tokens": 1}
    for body in (
        b"\xff",
        b"{}",
        json.dumps({"scheduler": "s", "opened": [{"spec": {**spec, "n": 10**9}, "epoch": 1}]}).encode(),
        json.dumps({"scheduler": "s", "opened": [{"spec": {**spec, "stop": [""]}, "epoch": 1}]}).encode(),
        json.dumps({"scheduler": "s", "opened": [{"spec": {**spec, "traceparent": "x"}, "epoch": 1}],
                    "tokens": [{"request_id": "x", "epoch": 1, "start": -5, "token_ids": [-7]}]}).encode(),
        json.dumps({"scheduler": "a b.*", "tokens": [{"request_id": "y", "epoch": 1, "start": 0}]}).encode(),
    ):  # fmt: skip
        await bus.transport.publish(subject, body, {})
    await ask(bus)
    await scheduler.answer("fine")
    await eventually(lambda: "stored" in scheduler.events)


async def test_spans_of_a_request_are_one_trace(
    bus: Bus, service: TokenizerService, scheduler: Scheduler, tracing: Tracing,
    span_exporter: InMemorySpanExporter, eventually: Eventually,
) -> None:  # fmt: skip
    with tracing.span("client"):
        await ask(bus)
    await scheduler.answer("Hello")
    await eventually(lambda: "stored" in scheduler.events)
    wanted = {"client", "tokenizer.encode", "publish work_item", "tokenizer.detokenize"}
    spans = [span for span in span_exporter.get_finished_spans() if span.name in wanted]
    assert {span.name for span in spans} == wanted
    assert len({span.context.trace_id for span in spans}) == 1


async def test_real_model_serves_chat(bus: Bus, serve: Serve, scheduler: Scheduler, model_path: Path) -> None:
    await serve(model={"source": str(model_path)})
    accepted = await ask(bus, prompt=None, messages=[{"role": "user", "content": "Hi"}])
    work = await scheduler.work()
    assert accepted.num_prompt_tokens == len(work.prompt_token_ids) == 31
    assert work.prompt_token_ids[:3] == (1, 9690, 198)  # <|im_start|>system
    assert work.stop_token_ids == (2,)
    with pytest.raises(UnsupportedParameter):
        await ask(bus, chat_template="{{ 1 }}")


async def test_unusable_model_file_is_named_at_the_start(bus: Bus, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(StartFailed, match="not a readable GGUF file"):
        await serve(model={"source": str(tmp_path / "broken.gguf")})
    with pytest.raises(StartFailed):
        await serve(model={"source": str(tmp_path / "absent.gguf")})


async def test_chat_template_is_compiled_at_the_start_and_may_be_absent(bus: Bus, serve: Serve, tmp_path: Path) -> None:
    entries = vocabulary_entries()
    plain = await serve(model={"source": str(write(tmp_path / "plain.gguf", entries))})
    with pytest.raises(InvalidParameter, match="has no chat template"):
        await ask(bus, prompt=None, messages=[{"role": "user", "content": "Hi"}])
    assert (await ask(bus, prompt="ab")).num_prompt_tokens == 1
    await plain.drain()
    entries["tokenizer.chat_template"] = string("{% for %}")
    with pytest.raises(StartFailed, match="The model cannot chat: the chat template has an error"):
        await serve(model={"source": str(write(tmp_path / "wrong.gguf", entries))})


async def test_a_template_that_never_ends_fails_its_request_and_holds_up_no_other(
    bus: Bus, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "MAX_CPU_S", 0.5)
    loops = "{% for a in range(n) %}{% for b in range(n) %}{% for c in range(n) %}{% endfor %}{% endfor %}{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}" + loops)
    await serve(tokenizer={"chat_template_file": file})
    chat = {"prompt": None, "messages": [{"role": "user", "content": "Hi"}]}
    endless = asyncio.create_task(ask(bus, **chat, chat_template_kwargs={"n": 99999}))
    plain = await ask(bus)  # not a conversation: it needs no template
    assert (plain.num_prompt_tokens, endless.done()) == (2, False)
    assert (await ask(bus, **chat, chat_template_kwargs={"n": 1})).num_prompt_tokens == 2
    with pytest.raises(InvalidParameter, match="more time or memory"):
        await endless
