"""The tokenizer on the bus: the front door of every request, and the way back of every token. An edge module."""

import asyncio
import logging
import secrets
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from opentelemetry.trace import SpanKind

from schemas.control import ExecutorCapacity
from schemas.errors import InvalidParameter, OutputNotFound, Unavailable
from schemas.generation import Accepted, GenerateRequest, WorkItem
from schemas.output import OutputChunk, TokenBatch
from schemas.subjects import subject_token
from schemas.tokenization import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from services.runtime.bus import Incoming, Server
from services.runtime.control import Command
from services.runtime.logs import request_logging
from services.runtime.model_source import ModelSourceError, resolve
from services.runtime.service import Context, StartFailed
from services.runtime.settings import BUILTIN_BYTES
from services.runtime.telemetry import current_traceparent
from services.runtime.transport import Appended, Subscription
from services.tokenizer.chat_template import ChatTemplate, Render
from services.tokenizer.checkpoint_vocabulary import open_vocabulary
from services.tokenizer.embedding import check_embedding_capacity
from services.tokenizer.grammar_check import GrammarCheck, GrammarSource
from services.tokenizer.meters import AdmissionMeters
from services.tokenizer.outputs import Outputs
from services.tokenizer.repetition import check_is_repeated, digest_of
from services.tokenizer.settings import Settings
from services.tokenizer.structured_output import asks_for_form, grammar_of
from services.tokenizer.template_process import TemplateProcess
from services.tokenizer.tokenization import detokenize, tokenize
from services.tokenizer.tool_format import tool_grammar, tools_in_use
from services.tokenizer.validation import Arrival, Validator
from services.tokenizer.vocabulary import BYTE_CHAT_TEMPLATE, Vocabulary, VocabularyError, byte_vocabulary

log = logging.getLogger(__name__)

QUEUE_GROUP = "tokenizer"
THREAD_MIN_CHARS = 2048
"""Shorter texts are encoded on the event loop: a thread would cost more. A chat template's process needs one anyhow."""
SETTLE_TIMEOUT_S = 5.0
SWEEP_PERIOD_S = 2.0
GRAMMAR_TIMEOUT_S = 10.0
"""For a place in the queue and the check itself, which has limits of its own."""


class TokenizerService:
    """Validates and accepts requests; turns tokens into text; the only writer of output logs."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self._settings = settings
        self._context = context
        self._model = settings.model.name
        self._vocabulary: Vocabulary = byte_vocabulary()
        self._validator = Validator(self._model, self._vocabulary, None)
        self._grammars = self._grammar_check()
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._template_process: TemplateProcess | None = None
        self._outputs: Outputs | None = None
        self._meters = AdmissionMeters(context.metrics)
        self._servers: list[Server[Any]] = []
        self._tokens: Subscription | None = None

    async def start(self) -> None:
        """Load the vocabulary, then serve both directions."""
        self._context.progress("loading vocabulary")
        loop = asyncio.get_running_loop()
        self._vocabulary = await asyncio.to_thread(self._load, loop)
        self._validator = Validator(self._model, self._vocabulary, await self._chat_template())
        self._grammars = self._grammar_check()
        bus, name = self._context.bus, self._context.instance
        max_wait_s = self._settings.tokenizer.max_output_wait_ms / 1e3
        outputs = Outputs(
            bus, self._context.tracing, name, self._vocabulary, self._context.metrics, max_wait_s=max_wait_s
        )
        self._outputs = outputs
        self._context.heartbeat.measure_load(lambda: {"num_outputs": len(outputs)})
        self._tokens = await bus.subscribe(
            bus.subjects.detok(name), TokenBatch, lambda incoming: outputs.apply(incoming.message)
        )
        options: Any = {"queue": QUEUE_GROUP, "max_concurrent": self._settings.tokenizer.max_concurrent}
        subjects, model = bus.subjects, self._model
        self._servers = [
            await bus.serve(subjects.tokenize(model), TokenizeRequest, self._tokenize, **options),
            await bus.serve(subjects.detokenize(model), DetokenizeRequest, self._detokenize, **options),
            await bus.serve(subjects.generate(model), GenerateRequest, self._generate, **options),
        ]

    def _load(self, loop: asyncio.AbstractEventLoop) -> Vocabulary:
        if self._settings.model.source == BUILTIN_BYTES:
            return byte_vocabulary()

        def progress(done: int, total: int | None) -> None:
            fraction = done / total if total else 0.0
            loop.call_soon_threadsafe(self._context.progress, "downloading model", fraction)

        try:
            return open_vocabulary(resolve(self._settings.model, progress))
        except (ModelSourceError, VocabularyError) as error:
            raise StartFailed(str(error)) from None

    def _grammar_check(self) -> GrammarCheck:
        return GrammarCheck(self._vocabulary, is_enabled=self._settings.tokenizer.structured_output)

    async def _chat_template(self) -> ChatTemplate | None:
        file = self._settings.tokenizer.chat_template_file
        try:
            source = self._vocabulary.chat_template if file is None else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartFailed(f"tokenizer.chat_template_file cannot be read: {error}.") from None
        if source is None:
            return None
        try:
            return ChatTemplate(source, self._vocabulary.template_tokens, await self._renderer(source))
        except (ValueError, Unavailable) as error:
            raise StartFailed(f"The model cannot chat: {str(error).rstrip('.')}.") from None

    async def _renderer(self, source: str) -> Render | None:
        """Only our own template is rendered here; one that came with a model has a process of its own."""
        if source == BYTE_CHAT_TEMPLATE:
            return None
        self._template_process = TemplateProcess(source)
        await asyncio.to_thread(self._template_process.start)
        return self._template_process.render

    # ---- the front door

    async def _generate(self, incoming: Incoming[GenerateRequest]) -> Accepted:
        """Answer at once: accepted and stored, or a coded error."""
        request, now_s = incoming.message, time.time()
        request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        with request_logging(request_id), self._meters.admission():
            may_be_old = request.request_id is not None and not request.is_new_id
            digest = digest_of(request)
            if may_be_old and (stored := await self._stored(request_id)) is not None:
                check_is_repeated(request_id, digest, stored.request_digest)
                num_prompt_tokens = stored.usage.prompt_tokens if stored.usage is not None else 0
                return self._repeated(request, request_id, num_prompt_tokens, stored.created_s)
            if request.resume:
                raise OutputNotFound("There is no output of this request to go on with, or it has expired.")
            self._validator.check(request)
            check_embedding_capacity(request, self._capacities(), self._context.bus.transport.max_payload)
            grammar = await self._grammar(request) if asks_for_form(request) else ""
            with self._context.tracing.span("tokenizer.encode") as span, self._meters.encoding():
                tokens = self._validator.truncate(request, await self._encode(request), self._max_model_len())
                span.set_attribute("gen_ai.usage.input_tokens", len(tokens))
            arrival = replace(self._arrival(request_id, now_s, incoming.reply, grammar), request_digest=digest)
            appended = await self._accept(request, tokens, arrival)
            if appended.duplicate:
                check_is_repeated(request_id, digest, await self._queued_digest(request_id, appended.sequence))
                return self._repeated(request, request_id, len(tokens), now_s)
            self._meters.accepted()
            log.debug("accepted with %d prompt tokens", len(tokens))
        return Accepted(request_id=request_id, model=self._model, num_prompt_tokens=len(tokens), created_s=now_s)

    async def _encode(self, request: GenerateRequest) -> tuple[int, ...]:
        size = len(request.prompt or "") + sum(len(str(message.content)) for message in request.messages or ())
        is_rendered_here = request.messages is None or self._template_process is None
        if is_rendered_here and size < THREAD_MIN_CHARS:
            return self._validator.encode(request)
        return await asyncio.to_thread(self._validator.encode, request)

    async def _grammar(self, request: GenerateRequest) -> str:
        """Return the grammar that binds the answer once it is known to be good; raises InvalidParameter."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(GRAMMAR_TIMEOUT_S):
                return await loop.run_in_executor(self._grammar_thread, self._checked_grammar, request)
        except TimeoutError:
            raise Unavailable("Too many grammars are being checked; try again.") from None

    def _checked_grammar(self, request: GenerateRequest) -> str:
        source = _grammar_source(request)
        if source is None:
            return ""
        self._grammars.check(source)
        return source.text

    def _arrival(self, request_id: str, now_s: float, reply: str | None, grammar: str) -> Arrival:
        return Arrival(
            request_id=request_id,
            now_s=now_s,
            random_seed=secrets.randbits(63),
            tokenizer=self._context.instance,
            reply=reply,
            traceparent=None,
            grammar=grammar,
        )

    async def _accept(self, request: GenerateRequest, tokens: tuple[int, ...], arrival: Arrival) -> Appended:
        """Store the work; a duplicate when the queue already has, or lately had, this id."""
        self._check_executors_know(tokens)
        bus = self._context.bus
        subject = bus.subjects.work(self._model, request.priority)
        with self._context.tracing.span(
            "publish work_item", kind=SpanKind.PRODUCER, attributes={"messaging.destination.name": subject}
        ):
            arrival = replace(arrival, traceparent=current_traceparent())
            work: WorkItem = self._validator.to_work(request, tokens, arrival, self._max_model_len())
            return await bus.append(subject, work, message_id=subject_token(arrival.request_id))

    def _max_model_len(self) -> int:
        """The least of: what is configured, the model's own context, what the executors can hold."""
        limits = [self._settings.model.max_model_len, self._vocabulary.context_length]
        if held := [min(c.max_model_len, c.num_blocks * c.block_size) for c in self._capacities()]:
            limits.append(max(held))
        return min(limit for limit in limits if limit > 0)

    def _capacities(self) -> list[ExecutorCapacity]:
        healthy = self._context.registry.healthy("executor")
        return [r.capacity for r in healthy if r.model == self._model and r.capacity is not None]

    def _check_executors_know(self, tokens: tuple[int, ...]) -> None:
        """Raise InvalidParameter for a token that would kill an executor whose engine has fewer than the model file."""
        size = min((capacity.vocab_size for capacity in self._capacities()), default=None)
        if size is not None and max(tokens, default=0) >= size:
            raise InvalidParameter(f"The executors know only the token ids from 0 to {size - 1}.", param="prompt")

    async def _stored(self, request_id: str) -> OutputChunk | None:
        """Return the last chunk of this id's output, if there is any."""
        subjects = self._context.bus.subjects
        last = await self._context.bus.last(subjects.out_stream, subjects.out(request_id), OutputChunk)
        return None if last is None else last.message

    async def _queued_digest(self, request_id: str, sequence: int) -> str:
        """Return what the work of this id asks, or what its output answers: work leaves only when that is stored."""
        bus = self._context.bus
        work = await bus.at(bus.subjects.work_stream, sequence, WorkItem)
        if work is not None:
            return work.message.output.request_digest
        stored = await self._stored(request_id)
        return "" if stored is None else stored.request_digest

    def _repeated(
        self, request: GenerateRequest, request_id: str, num_prompt_tokens: int, created_s: float
    ) -> Accepted:
        """The same request again: its reader finds the stored output in the log."""
        if request.deliver == "reply":
            subject = self._context.bus.subjects.out(request_id)
            raise InvalidParameter(
                f"The request_id {request_id!r} was used before; read its output from {subject}, or choose another id.",
                param="request_id",
            )
        return Accepted(
            request_id=request_id, model=self._model, num_prompt_tokens=num_prompt_tokens, created_s=created_s
        )

    async def _tokenize(self, incoming: Incoming[TokenizeRequest]) -> TokenizeReply:
        return await asyncio.to_thread(
            tokenize, incoming.message, self._validator, self._vocabulary, self._max_model_len()
        )

    async def _detokenize(self, incoming: Incoming[DetokenizeRequest]) -> DetokenizeReply:
        return await asyncio.to_thread(detokenize, incoming.message, self._validator, self._vocabulary)

    # ---- life

    async def wait(self) -> None:
        """Nothing ends this service but a signal; meanwhile, outputs that others have taken over are forgotten."""
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            if self._outputs is not None:
                await self._outputs.sweep()

    async def drain(self) -> None:
        """Accept nothing new; store what has come. The scheduler hands what still runs to another tokenizer."""
        for server in self._servers:
            await server.close()
        if self._outputs is not None:
            await self._outputs.settle(SETTLE_TIMEOUT_S)

    def commands(self) -> dict[str, Command]:
        """Nothing beyond what every service can be told."""
        return {}

    async def stop(self) -> None:
        """Drop what is left; the log and the scheduler know how to go on."""
        if self._tokens is not None:
            await self._tokens.close()
        if self._outputs is not None:
            self._outputs.close()
        if self._template_process is not None:
            await asyncio.to_thread(self._template_process.close)
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._grammars.close)


def _grammar_source(request: GenerateRequest) -> GrammarSource | None:
    """What binds the answer: its own form, or that of tool calls; raises InvalidParameter for both."""
    form, calls = grammar_of(request), tool_grammar(request, tools_in_use(request))
    if form is not None and calls is not None:
        raise InvalidParameter(f"{form.param} cannot be combined with tools that may be called.", param=form.param)
    return form or calls
