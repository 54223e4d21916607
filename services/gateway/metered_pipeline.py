"""The pipeline with a meter around every generation: what HTTP clients get, counted and timed. Knows no HTTP."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from schemas.errors import NatterjackError
from schemas.generation import GenerateRequest
from schemas.openai import Model
from schemas.output import OutputChunk
from schemas.tokenization import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from services.gateway.pipeline import Generation, Pipeline
from services.runtime.metrics import Metrics
from services.runtime.request_meter import RequestMeter, RequestTimes
from services.runtime.telemetry import current_trace_id


class MeteredPipeline:
    """Passes everything on to another pipeline."""

    def __init__(self, pipeline: Pipeline, metrics: Metrics) -> None:
        self._pipeline = pipeline
        self.meter = RequestMeter(metrics)

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Yield the generation once the request is accepted; leaving early counts as an abort."""
        times = self.meter.begin(time.perf_counter(), current_trace_id())
        try:
            async with self._accepted(request, times) as generation:
                yield Generation(generation.accepted, _metered(generation.chunks, times))
        finally:
            times.close()

    @contextlib.asynccontextmanager
    async def _accepted(self, request: GenerateRequest, times: RequestTimes) -> AsyncIterator[Generation]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                generation = await stack.enter_async_context(self._pipeline.generate(request))
            except NatterjackError as error:
                times.failed(error.code)
                raise
            times.accepted(generation.accepted.num_prompt_tokens)
            yield generation

    async def usable_id(self, base: str) -> str:
        """Return the id whose output is not a failure."""
        return await self._pipeline.usable_id(base)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Return a prompt's tokens."""
        return await self._pipeline.tokenize(request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """Return the text of tokens."""
        return await self._pipeline.detokenize(request)

    def models(self) -> Sequence[Model]:
        """Return the models that this deployment is for."""
        return self._pipeline.models()

    def missing_roles(self) -> Sequence[str]:
        """Return the services of the path that have no healthy instance."""
        return self._pipeline.missing_roles()


async def _metered(chunks: AsyncIterator[OutputChunk], times: RequestTimes) -> AsyncIterator[OutputChunk]:
    try:
        async for chunk in chunks:
            times.chunk(chunk, time.perf_counter())
            yield chunk
    except NatterjackError as error:
        times.failed(error.code)
        raise
