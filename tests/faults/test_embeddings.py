"""An embedding is the same vector whatever dies while it is made, and however its prompt is cut into steps."""

import asyncio
import signal
from typing import Any

import httpx
import pytest

from engine_core.engine import ENGINES
from schemas.control import Role
from schemas.errors import UnsupportedParameter
from schemas.generation import GenerateRequest
from services.runtime import generation
from services.runtime.generation import generate
from services.runtime.telemetry import Tracing
from services.scheduler import service as scheduler_service
from tests.faults.deployment import Deployment as ProcessDeployment
from tests.integration.services_in_memory import Deployment, ask, deployed

PROMPTS = ["a toad " * 30, "short", "the last one of these is of middling length", "x" * 600]
NUM_PROMPTS = 24


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of seconds become a tenth; the engine has hidden states."""
    monkeypatch.setitem(ENGINES, "echo", "tests.faults.embedding_engine:load")
    monkeypatch.setattr(scheduler_service, "CHECK_PERIOD_S", 0.03)
    monkeypatch.setattr(generation, "POLL_S", 0.1)


async def vector_of(deployment: Deployment, prompt: str, **options: Any) -> str:
    """Ask for one embedding; it comes once, in the final chunk."""
    request = GenerateRequest.model_validate({"model": "smol", "prompt": prompt, "pooling": "mean", **options})
    vectors: list[str] = []
    async with asyncio.timeout(30), generate(deployment.bus(), request) as stream:
        async for chunk in stream:
            assert chunk.error is None, chunk.error
            vectors += [delta.embedding for delta in chunk.choices if delta.embedding is not None]
            if chunk.final:
                assert chunk.usage is not None
                assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (len(prompt), 0)
    [vector] = vectors
    return vector


async def vectors_of(deployment: Deployment, **options: Any) -> list[str]:
    return [await vector_of(deployment, prompt, **options) for prompt in PROMPTS]


async def test_steps_of_any_size_neighbours_and_a_warm_cache_give_the_same_bits(tracing: Tracing) -> None:
    async with deployed(tracing) as deployment:
        means, lasts = await vectors_of(deployment), await vectors_of(deployment, pooling="last")
        assert len({*means, *lasts}) == 2 * len(PROMPTS)
        assert await vectors_of(deployment) == means  # its blocks are cached by now
    async with deployed(tracing, scheduler={"max_num_batched_tokens": 13}) as deployment:
        together = await asyncio.gather(
            vectors_of(deployment),
            vectors_of(deployment, pooling="last"),
            ask(deployment, "text beside the embeddings", max_tokens=40),
            *(vector_of(deployment, prompt) for prompt in PROMPTS),
        )
        assert together[:2] == [means, lasts]
        assert together[3:] == means


@pytest.mark.parametrize(
    "role", ["executor", *(pytest.param(role, marks=pytest.mark.slow) for role in ("scheduler", "tokenizer"))]
)
async def test_a_death_under_load_changes_no_vector(tracing: Tracing, role: Role) -> None:
    async with deployed(
        tracing, executor={"step_time_s": 0.01}, scheduler={"max_num_batched_tokens": 64}
    ) as deployment:
        prompts = [f"{PROMPTS[number % len(PROMPTS)]} {number}" for number in range(NUM_PROMPTS)]
        expected = [await vector_of(deployment, prompt) for prompt in prompts]
        asked = [asyncio.create_task(vector_of(deployment, prompt, cache_salt="again")) for prompt in prompts]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert not all(task.done() for task in asked)
        await deployment.kill(f"{role}-0")
        await deployment.start(role, f"{role}-0")
        assert await asyncio.gather(*asked) == expected


async def test_an_engine_without_hidden_states_says_so_at_once(
    tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "echo", "engine_core.echo:load")
    async with deployed(tracing) as deployment:
        with pytest.raises(UnsupportedParameter, match="echo"):
            await vector_of(deployment, "x")
        assert (await ask(deployment, "ab", max_tokens=2)).text == {0: "ab"}


@pytest.mark.slow
async def test_the_real_executor_is_killed_under_load_and_every_vector_is_the_same(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Processes, a broker and the default model; the executor dies twice while vectors come."""
    prompts = [f"{number}: {PROMPTS[number % 3]} and so on. " * (1 + number % 9) for number in range(4 * NUM_PROMPTS)]
    async with ProcessDeployment(tmp_path_factory.mktemp("real"), ("executor.num_blocks=1024",)) as deployment:
        await deployment.wait_whole()

        async def ask_all() -> list[str]:
            async with httpx.AsyncClient(base_url=deployment.of("gateway")[0].http_url, timeout=120) as http:
                body = {"input": prompts, "encoding_format": "base64"}
                answer = (await http.post("/v1/embeddings", json=body)).raise_for_status().json()
                return [item["embedding"] for item in answer["data"]]

        expected = await ask_all()
        asked = asyncio.create_task(ask_all())
        [executor] = deployment.of("executor")
        for pause_s in (0.3, 2.5):
            await asyncio.sleep(pause_s)
            executor.signal(signal.SIGKILL)
        assert await asked == expected
        assert executor.num_starts >= 2
