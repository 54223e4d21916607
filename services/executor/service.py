"""The executor on the bus: plans in, results out, progress into the registry. The only file here that knows the bus."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from engine_core.engine import EngineInfo
from engine_core.errors import ModelError
from schemas.control import ExecutorCapacity
from schemas.errors import NatterjackError, PayloadTooLarge
from schemas.step import StepPlan, StepResult
from services.executor.capabilities import engine_config
from services.executor.engine_thread import EngineThread, Events, StepOutcome
from services.executor.meters import ExecutorMeters
from services.executor.sequences import Ended, without_embeddings
from services.executor.settings import Settings
from services.executor.step_spans import StepSpans
from services.executor.weights_version import weights_version
from services.runtime.bus import Incoming
from services.runtime.control import Command
from services.runtime.model_source import ModelSourceError, resolve
from services.runtime.service import Context, StartFailed
from services.runtime.transport import Subscription

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class ExecutorService:
    """Owner of one accelerator."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self._settings = settings
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._outcomes: asyncio.Queue[StepOutcome] = asyncio.Queue()
        self._thread: EngineThread | None = None
        self._subscription: Subscription | None = None
        self._sender: asyncio.Task[None] | None = None
        self._step_spans = StepSpans(context.tracing)
        self._meters = ExecutorMeters(context.metrics, lambda: self._thread.num_sequences if self._thread else 0)

    async def start(self) -> None:
        """Load the engine, publish its capacity, listen for plans."""
        self._context.progress("loading model")
        model_path = await self._model_file()
        thread = self._thread = EngineThread(
            self._settings.executor.engine,
            engine_config(self._settings.model, self._settings.executor, model_path),
            self._events(),
            append_forced_tokens=self._settings.executor.append_forced_tokens,
        )
        thread.start()
        try:
            info = await self._loaded
        except ModelError as error:
            raise StartFailed(f"The model cannot be loaded: {error}") from None
        log.info("engine %s on %s (%s): %d blocks", info.name, info.device, info.kernels, info.num_blocks)
        self._context.heartbeat.update(capacity=_capacity(info, weights_version(model_path)))
        self._meters.loaded(self._context.instance, info)
        self._sender = asyncio.create_task(self._send(), name="results")
        subject = self._context.bus.subjects.plan(self._context.instance)
        self._subscription = await self._context.bus.subscribe(subject, StepPlan, self._on_plan)

    async def _model_file(self) -> Path | None:
        if self._settings.executor.engine == "echo":
            return None
        try:
            return await asyncio.to_thread(resolve, self._settings.model, self._download_progress)
        except ModelSourceError as error:
            raise StartFailed(str(error)) from None

    def _download_progress(self, done: int, total: int | None) -> None:
        fraction = done / total if total else 0.0
        self._loop.call_soon_threadsafe(self._context.progress, "downloading model", fraction)

    def _events(self) -> Events:
        """The thread's callbacks, each handed over to the event loop."""
        return Events(
            progress=lambda stage, fraction: self._hand_over(self._context.progress, stage, fraction),
            loaded=lambda info: self._hand_over(_resolve, self._loaded, info),
            stepped=lambda outcome: self._hand_over(self._outcomes.put_nowait, outcome),
            failed=lambda error: self._hand_over(self._on_failed, error),
        )

    def _hand_over(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_failed(self, error: BaseException) -> None:
        for future in (self._loaded, self._broken):
            if not future.done():
                future.set_exception(error)

    def _on_plan(self, incoming: Incoming[StepPlan]) -> None:
        self._step_spans.planned(incoming.message)
        if self._thread is not None and not self._thread.submit(incoming.message):
            log.error("dropped step %d: too many plans are waiting", incoming.message.step)

    async def _send(self) -> None:
        """Publish results in order, from one task."""
        instance = self._context.instance
        subject = self._context.bus.subjects.result(instance)
        while True:
            outcome = await self._outcomes.get()
            self._meters.stepped(outcome.result, outcome.phase)
            result: StepResult = outcome.result.model_copy(update={"executor": instance})
            try:
                await self._publish(subject, result)
            except NatterjackError as error:  # the scheduler notices the missing number and starts a new epoch
                log.warning("the result of step %d was lost: %s", result.step, error.message)
            self._step_spans.stepped(outcome, time.time())
            for ended in outcome.ended:
                self._trace(ended)

    async def _publish(self, subject: str, result: StepResult) -> None:
        """Vectors that together exceed a message fail, or the step would be run again and again."""
        try:
            await self._context.bus.publish(subject, result)
        except PayloadTooLarge as error:
            log.error("the embeddings of step %d fail: %s", result.step, error.message)
            await self._context.bus.publish(subject, without_embeddings(result))

    def _trace(self, ended: Ended) -> None:
        """One span for the prompt, one for the tokens after the first."""
        data, tracing = ended.data, self._context.tracing
        steps = self._step_spans.take_links(data.sequence)
        if data.traceparent is None:
            return
        attributes: dict[str, str | int] = {"natterjack.request_id": data.request_id, "natterjack.choice": data.index}
        first_s = ended.first_token_s
        tracing.record(
            "executor.prefill",
            parent=data.traceparent,
            start_s=ended.started_s,
            end_s=first_s,
            attributes={**attributes, "gen_ai.usage.input_tokens": data.prompt_len},
            links=steps if first_s is None else (),
        )
        if first_s is not None:
            tracing.record(
                "executor.decode",
                parent=data.traceparent,
                start_s=first_s,
                attributes={**attributes, "gen_ai.usage.output_tokens": ended.num_generated},
                links=steps,
            )

    async def wait(self) -> None:
        """End with the engine's error; the process then restarts with a fresh engine."""
        await self._broken

    async def drain(self) -> None:
        """Take no more plans; the scheduler resumes the sequences elsewhere."""
        if self._subscription is not None:
            await self._subscription.close()

    def commands(self) -> dict[str, Command]:
        """Nothing beyond what every service can be told."""
        return {}

    async def stop(self) -> None:
        """End the engine's thread."""
        if self._sender is not None:
            self._sender.cancel()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop, STOP_TIMEOUT_S)
        for future in (self._loaded, self._broken):
            if future.done() and not future.cancelled():
                future.exception()  # seen; nobody is left to await it


def _resolve(future: "asyncio.Future[EngineInfo]", info: EngineInfo) -> None:
    if not future.done():
        future.set_result(info)


def _capacity(info: EngineInfo, weights: str) -> ExecutorCapacity:
    return ExecutorCapacity(
        engine=info.name,
        model_file=info.model,
        device=info.device,
        kernels=info.kernels,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        weights_version=weights,
        embedding_size=info.embedding_size,
        num_host_blocks=info.num_host_blocks,
    )
