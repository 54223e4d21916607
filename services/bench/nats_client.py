"""Asks a deployment over NATS, as any client on the bus would, and notes when each chunk came."""

from time import perf_counter

from pydantic import ValidationError

from schemas.errors import NatterjackError, from_body
from schemas.generation import ChatMessage, GenerateRequest
from schemas.output import OutputChunk
from services.bench.client import RequestFailed, RequestOptions
from services.bench.prompts import Prompt
from services.bench.record import RequestRecord
from services.runtime.bus import Bus
from services.runtime.generation import generate


class NatsClient:
    """One benchmark's client on an open bus."""

    def __init__(self, bus: Bus, options: RequestOptions, accept_timeout_s: float) -> None:
        self._bus = bus
        self._options = options
        self._accept_timeout_s = accept_timeout_s

    async def run(self, prompt: Prompt, record: RequestRecord) -> None:
        """See `Client.run`."""
        request = self._request(prompt)
        record.started_s = perf_counter()
        try:
            async with generate(self._bus, request, accept_timeout_s=self._accept_timeout_s) as generation:
                async for chunk in generation:
                    self._note(chunk, record, perf_counter())
        except NatterjackError as error:
            raise RequestFailed(error.code) from None
        record.ended_s = perf_counter()

    def _request(self, prompt: Prompt) -> GenerateRequest:
        options = self._options
        fields = {
            "model": options.model,
            "max_tokens": prompt.max_tokens,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            **options.extra,
        }
        try:
            if prompt.messages is None:
                return GenerateRequest(prompt=prompt.content, **fields)
            messages = tuple(ChatMessage.model_validate(message) for message in prompt.messages)
            return GenerateRequest(messages=messages, **fields)
        except ValidationError as error:
            raise RequestFailed(f"The request is invalid: {error.errors()[0]['msg']}") from None

    def _note(self, chunk: OutputChunk, record: RequestRecord, now_s: float) -> None:
        if chunk.error is not None:
            raise from_body(chunk.error)
        num_tokens = sum(len(delta.token_ids) for delta in chunk.choices)
        if num_tokens or any(delta.text for delta in chunk.choices):
            record.pieces_s.append(now_s)
            record.num_output_tokens += num_tokens
        if self._options.keep_text:
            record.text += "".join(delta.text for delta in chunk.choices)
        if chunk.usage is not None:
            record.num_prompt_tokens = chunk.usage.prompt_tokens
            record.num_output_tokens = chunk.usage.completion_tokens
            record.num_cached_tokens = chunk.usage.cached_tokens
