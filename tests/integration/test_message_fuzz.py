"""Garbage on every subject: random bytes, random JSON, and valid messages that were changed, kill and hang no service.

The real services run in memory. After each volley they are all alive, their gauges are at rest, and the next request is
answered in full.
"""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from schemas.generation import PRIORITIES
from schemas.subjects import Subjects
from services.runtime.telemetry import Tracing
from tests.integration.services_in_memory import Deployment, ask, deployed, echo_of

SUBJECTS = Subjects("test")
GOLDEN = {path.stem: json.loads(path.read_text()) for path in Path("tests/contract/golden").glob("*.json")}
TARGETS = {
    SUBJECTS.generate("smol"): "generate_request",
    SUBJECTS.tokenize("smol"): "tokenize_request",
    SUBJECTS.detokenize("smol"): "detokenize_request",
    SUBJECTS.cache("smol"): "cache_command",
    SUBJECTS.plan("executor-0"): "step_plan",
    SUBJECTS.result("executor-0"): "step_result",
    SUBJECTS.detok("tokenizer-0"): "token_batch",
    SUBJECTS.feedback("scheduler-0"): "output_feedback",
    SUBJECTS.cancel("req-1"): "cancel",
}
STORED = {SUBJECTS.work("smol", PRIORITIES[0]): "work_item"}
VOLLEY = 40
SHORT_CONTEXT = {"max_model_len": 512}
"""What is left of a request may be one without a limit of tokens, which runs to the end of the context."""
REST_TIMEOUT_S = 20.0

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 3) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
"""Numbers are small: a higher epoch than the real one is a newer scheduler's word, not garbage."""


@st.composite
def changed(draw: st.DrawFn, kind: str) -> tuple[dict[str, str], bytes]:
    """A valid message in which some values were replaced, removed or cut off."""
    message = copy.deepcopy(GOLDEN[kind])
    headers, body = message["headers"], message["body"]
    body |= {"epoch": draw(st.integers(-2, 1))} if "epoch" in body else {}
    for _ in range(draw(st.integers(1, 3))):
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.booleans()):
                place[key] = draw(json_values)
            elif isinstance(place, dict):
                del place[key]
            break
    raw = json.dumps(body).encode()
    return headers, raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 4)) == 0 else raw


@st.composite
def garbage(draw: st.DrawFn, targets: dict[str, str]) -> tuple[str, dict[str, str], bytes]:
    """(subject, headers, body)"""
    subject = draw(st.sampled_from(sorted(targets)))
    headers = draw(
        st.sampled_from([{}, GOLDEN[targets[subject]]["headers"], {"Nj-Schema": "other/9"}, {"Nj-Schema": ""}])
    )
    match draw(st.integers(0, 3)):
        case 0:
            return subject, headers, draw(st.binary(max_size=60))
        case 1:
            return subject, headers, json.dumps(draw(json_values)).encode()
        case _:
            return subject, *draw(changed(targets[subject]))


volleys = st.tuples(
    st.lists(garbage(TARGETS), min_size=VOLLEY, max_size=VOLLEY), st.lists(garbage(STORED), min_size=2, max_size=2)
)


async def is_at_rest(deployment: Deployment) -> None:
    """Wait until nothing runs or waits, and every block is free."""
    async with asyncio.timeout(REST_TIMEOUT_S):
        while True:
            loads = {name: instance.load for name, instance in deployment.instances.items()}
            busy = {key: value for load in loads.values() for key, value in load.items() if key in BUSY and value}
            pool = loads["cache_manager-0"]
            if not busy and pool["num_free_blocks"] == pool["num_blocks"]:
                return
            await asyncio.sleep(0.02)


BUSY = frozenset({"num_requests_running", "num_requests_waiting"})
"""Not the tokenizer's outputs: one that a forged scheduler has opened waits for that scheduler's word."""


async def fire(sent: list[tuple[str, dict[str, str], bytes]], stored: list[tuple[str, dict[str, str], bytes]]) -> None:
    tracing = Tracing(TracerProvider())
    async with deployed(tracing, model=SHORT_CONTEXT) as deployment:
        transport = deployment.bus().transport
        running = asyncio.create_task(ask(deployment, "abc", max_tokens=200))
        for number, (subject, headers, body) in enumerate(sent):
            await transport.publish(subject, body, headers, f"_INBOX.fuzz.{number}")
        for subject, headers, body in stored:
            await transport.append(subject, body, headers)
        assert (await running).text == {0: echo_of("abc", 200)}
        for instance in deployment.instances.values():
            assert not instance.waiting.done(), f"{instance.name} has ended"
        assert (await ask(deployment, "xyz", max_tokens=7)).text == {0: "xyzxyzx"}
        await is_at_rest(deployment)
    tracing.close()


def volley(max_examples: int) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    return settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@volley(4)
@given(volleys)
def test_garbage_on_every_subject_kills_and_hangs_nothing(messages: tuple[list[Any], list[Any]]) -> None:
    asyncio.run(fire(*messages))


@pytest.mark.slow
@volley(120)
@given(volleys)
def test_thousands_of_pieces_of_garbage_kill_and_hang_nothing(messages: tuple[list[Any], list[Any]]) -> None:
    asyncio.run(fire(*messages))
