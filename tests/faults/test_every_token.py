"""A service dies at every token of a request, and the request says what it says undisturbed: in memory, to be quick.

The request draws at temperature 1 with a seed, has penalties and logprobs, and ends at a stop string of several tokens,
so that some deaths come in the middle of it, and in the middle of a character. Another one is bound to a JSON schema:
deaths come in the middle of every construct of its grammar.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine_core.engine import ENGINES
from schemas.control import PATH_ROLES, Role
from schemas.generation import GenerateRequest
from schemas.output import ChoiceDelta, OutputChunk, Usage
from schemas.step import StepResult
from services.cache_manager import service as cache_manager_service
from services.runtime import generation
from services.runtime.generation import generate
from services.runtime.telemetry import Tracing
from services.scheduler import service as scheduler_service
from services.scheduler import session
from tests.integration.services_in_memory import Deployment, deployed

NUM_TOKENS = 36
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["bad", "cab"]}, "minItems": 1, "maxItems": 2},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
OPTIONS: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {"101": 1.0},
    "logprobs": 3,
    "min_tokens": 2,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of seconds become a tenth; the engine draws."""
    monkeypatch.setitem(ENGINES, "echo", "tests.faults.drawing_engine:load")
    monkeypatch.setattr(scheduler_service, "CHECK_PERIOD_S", 0.03)
    monkeypatch.setattr(cache_manager_service, "SWEEP_PERIOD_S", 0.1)
    monkeypatch.setattr(session, "CACHE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(session, "CACHE_RETRY_S", 0.03)
    monkeypatch.setattr(generation, "POLL_S", 0.1)


class Transcript:
    """Everything that a stream said, joined over its chunks."""

    def __init__(self) -> None:
        self.deltas: list[ChoiceDelta] = []
        self.usage: Usage | None = None
        self.num_final = 0

    def add(self, chunk: OutputChunk) -> None:
        """Take a chunk; what it says must follow what was said."""
        assert chunk.error is None, chunk.error
        for delta in chunk.choices:
            assert delta.start == len(self.tokens), "tokens are repeated or lost"
            self.deltas.append(delta)
        self.num_final += chunk.final
        self.usage = chunk.usage or self.usage

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    def said(self) -> dict[str, Any]:
        """Return what must not depend on any fault."""
        assert self.num_final == 1
        assert self.usage is not None
        return {
            "tokens": self.tokens,
            "text": "".join(delta.text for delta in self.deltas),
            "logprobs": [item for delta in self.deltas for item in delta.logprobs or ()],
            "ends": [(d.finish_reason, d.stop_reason) for d in self.deltas if d.finish_reason is not None],
            "usage": (self.usage.prompt_tokens, self.usage.completion_tokens),
        }


async def transcribe(deployment: Deployment, seen: Callable[[int], None] | None = None, **options: Any) -> Transcript:
    """Run the request; `seen` hears how many tokens have come."""
    request = GenerateRequest.model_validate({"model": "smol", "prompt": "a bad cab. ", **OPTIONS, **options})
    transcript = Transcript()
    async with asyncio.timeout(20), generate(deployment.bus(), request) as stream:
        async for chunk in stream:
            transcript.add(chunk)
            if seen is not None:
                seen(len(transcript.tokens))
    return transcript


async def stop_string_at(deployment: Deployment, position: int) -> str:
    """Return a string of several tokens that the undisturbed text has first at about `position`."""
    text = "".join(delta.text for delta in (await transcribe(deployment, max_tokens=4 * NUM_TOKENS)).deltas)
    while text.index(text[position : position + 4]) != position:
        position += 1
    return text[position : position + 4]


async def killed_at(deployment: Deployment, role: Role, index: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run the request, and let a service die when `index` tokens have come."""
    due = asyncio.Event()

    async def kill() -> None:
        await due.wait()
        await deployment.kill(f"{role}-0")
        await deployment.start(role, f"{role}-0")

    killing = asyncio.create_task(kill())
    if index == 0:
        due.set()
    transcript = await transcribe(deployment, lambda count: due.set() if count >= index else None, **options)
    due.set()
    await killing
    return transcript.said()


async def drawn_until_a_stop_string(deployment: Deployment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request's options, and what it says undisturbed."""
    stop = await stop_string_at(deployment, NUM_TOKENS - 6)
    options = {"max_tokens": 4 * NUM_TOKENS, "stop": ("unlikely", stop)}
    expected = (await transcribe(deployment, **options)).said()
    assert expected["ends"] == [("stop", stop)]
    assert len(expected["tokens"]) >= NUM_TOKENS - 6
    return options, expected


async def bound_to_a_schema(deployment: Deployment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request's options, and the document that it says undisturbed."""
    options = {"max_tokens": 4 * NUM_TOKENS, "structured_outputs": {"json": SCHEMA}}
    expected = (await transcribe(deployment, **options)).said()
    assert set(json.loads(expected["text"])) == {"name", "tags", "age"}
    assert len(expected["tokens"]) >= NUM_TOKENS
    return options, expected


async def bound_to_a_schema_that_forces_tokens(deployment: Deployment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request's options, and the document that it says undisturbed: without logprobs, tokens are forced."""
    options = {"max_tokens": 4 * NUM_TOKENS, "structured_outputs": {"json": SCHEMA}, "logprobs": None}
    return options, (await transcribe(deployment, **options)).said()


Asked = Callable[[Deployment], Awaitable[tuple[dict[str, Any], dict[str, Any]]]]
ASKED: tuple[Asked, ...] = (drawn_until_a_stop_string, bound_to_a_schema, bound_to_a_schema_that_forces_tokens)


async def sweep(tracing: Tracing, asked: Asked, cases: list[tuple[Role, int]]) -> None:
    async with deployed(tracing, executor={"step_time_s": 0.004}) as deployment:
        options, expected = await asked(deployment)
        for role, index in cases:
            await deployment.wait_ready()
            said = await killed_at(deployment, role, index, options)
            assert said == expected, f"{role} killed at token {index}"


async def test_death_at_every_token_of_a_request(tracing: Tracing) -> None:
    """The services in turn: each token sees one of them die."""
    await sweep(tracing, drawn_until_a_stop_string, [(PATH_ROLES[i % 4], i) for i in range(NUM_TOKENS)])


async def test_death_within_a_document_that_follows_a_schema(tracing: Tracing) -> None:
    """Every third token, so that each of the services dies in each third of the document."""
    await sweep(tracing, bound_to_a_schema, [(PATH_ROLES[i % 4], i) for i in range(0, NUM_TOKENS, 3)])


async def test_death_between_tokens_that_a_schema_forces(tracing: Tracing) -> None:
    """Every third token, as above; tokens come several at a time."""
    cases: list[tuple[Role, int]] = [(PATH_ROLES[i % 4], i) for i in range(1, NUM_TOKENS, 3)]
    await sweep(tracing, bound_to_a_schema_that_forces_tokens, cases)


async def test_forced_tokens_are_those_that_would_be_sampled_and_need_fewer_steps(tracing: Tracing) -> None:
    said, num_steps = [], []
    for append in (False, True):
        steps: list[int] = []
        async with deployed(tracing, executor={"append_forced_tokens": append}) as deployment:
            bus = deployment.bus()
            subject = bus.subjects.result("executor-0")
            await bus.subscribe(subject, StepResult, lambda incoming, steps=steps: steps.append(incoming.message.step))
            said.append((await bound_to_a_schema_that_forces_tokens(deployment))[1])
            num_steps.append(len(set(steps)))
    assert said[0] == said[1]
    assert num_steps[1] < 0.85 * num_steps[0]  # how many plans were ahead of an end depends on timing


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("role", PATH_ROLES)
async def test_death_of_each_service_at_every_token_of_a_request(tracing: Tracing, role: Role, asked: Asked) -> None:
    await sweep(tracing, asked, [(role, index) for index in range(NUM_TOKENS)])
