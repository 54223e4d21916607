"""The short form of the fault suite: every service dies, is paused past its lease, cut off and restarted, under load.

Every stream must say what it says undisturbed, once, and nothing may be left behind. `python -m tests.faults` is the
long form.
"""

import asyncio
import random
import signal

import pytest

from schemas.control import PATH_ROLES
from tests.faults.deployment import ECHO, Deployment
from tests.faults.faults import BROKER
from tests.faults.http_streams import http_streams
from tests.faults.leaks import census, leaks
from tests.faults.replies import reply_streams
from tests.faults.streams import echo_streams, model_streams
from tests.faults.trial import Trial, run_trial, table

NUM_STREAMS = 16
NUM_TOKENS = 150
AWAY_S = 5.5
"""Longer than the leases (3 s), and than the silence after which an instance does not count (2.5 s)."""


async def disturb(deployment: Deployment, trials: list[Trial], randomness: random.Random) -> None:
    for number, trial in enumerate(trials):
        streams = echo_streams(range(number * NUM_STREAMS, (number + 1) * NUM_STREAMS), NUM_TOKENS)
        await run_trial(deployment, trial, streams, randomness=randomness)
    check(deployment, trials)


def check(deployment: Deployment, trials: list[Trial]) -> None:
    print(table(trials))
    problems = [f"{trial.fault} {trial.target}: {problem}" for trial in trials for problem in trial.problems]
    assert not problems, "\n".join([table(trials), *problems, deployment.log()])


async def test_any_service_and_the_broker_may_be_killed_or_restarted(
    single: Deployment, randomness: random.Random
) -> None:
    targets = [f"{role}-0" for role in PATH_ROLES]
    killed = [Trial("kill", target) for target in (*targets, BROKER)]
    trials = killed + [Trial("terminate", target) for target in targets]
    await disturb(single, [Trial("nothing", BROKER)], randomness)
    before = await census(single)
    await disturb(single, trials, randomness)
    assert await leaks(single, before, NUM_STREAMS * len(trials)) == []


async def test_client_of_a_dead_gateway_goes_on_at_another(
    tmp_path_factory: pytest.TempPathFactory, randomness: random.Random
) -> None:
    """The first gateway is away for good: its clients come to the second with the id of their last event."""
    async with Deployment(tmp_path_factory.mktemp("gateways"), ECHO, {"gateway": 2}) as deployment:
        urls = [instance.http_url for instance in deployment.of("gateway")]
        streams = http_streams(urls, range(NUM_STREAMS), NUM_TOKENS)
        trial = await run_trial(deployment, Trial("kill", "gateway-0"), streams, randomness=randomness)
        check(deployment, [trial])
        assert any(stream.num_connections > 1 and stream.text for stream in streams)


async def test_who_is_away_is_replaced_and_comes_back_harmlessly(
    doubled: Deployment, randomness: random.Random
) -> None:
    await doubled.wait_whole()
    trials = [
        Trial("pause", target, AWAY_S) for target in (doubled.driving_scheduler(), doubled.owning_cache_manager())
    ]
    await disturb(
        doubled, trials + [Trial("cut", target, AWAY_S) for target in ("tokenizer-1", "executor-1")], randomness
    )
    slowest_s = max(stream.longest_silence_s for trial in trials for stream in trial.streams)
    assert slowest_s < AWAY_S, "nobody took over: everything waited for the one that was away"


async def test_zombie_cannot_change_any_output(doubled: Deployment, randomness: random.Random) -> None:
    """An executor and a tokenizer sleep past their leases; everything ends without them, and then they wake up."""
    await doubled.wait_whole()
    zombies = [doubled.instances[name] for name in ("executor-0", "tokenizer-0")]
    streams = echo_streams(range(NUM_STREAMS), NUM_TOKENS)
    replies = reply_streams(range(NUM_STREAMS), NUM_TOKENS)
    running = [asyncio.create_task(stream.run(doubled.bus)) for stream in (*streams, *replies)]
    async with asyncio.timeout(30):
        while not all(stream.is_begun for stream in streams):
            await asyncio.sleep(0.01)
    for zombie in zombies:
        zombie.signal(signal.SIGSTOP)
    await asyncio.gather(*running)
    assert [stream.problem for stream in (*streams, *replies) if stream.problem] == [], doubled.log()
    logs = await doubled.outputs()
    for zombie in zombies:
        zombie.signal(signal.SIGCONT)
    await doubled.wait_whole()
    assert await doubled.wait_idle() == {}
    assert await doubled.outputs() == logs, "a zombie wrote"
    assert [stream.problem for stream in replies if stream.problem] == [], "a zombie replied"
    for chunks in logs.values():
        epochs = [chunk.epoch for chunk in chunks]
        assert epochs == sorted(epochs)
        assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert any(chunks[0].epoch < chunks[-1].epoch for chunks in logs.values()), "nobody took over from a zombie"


async def test_real_model_says_the_same_after_a_death(
    tmp_path_factory: pytest.TempPathFactory, randomness: random.Random
) -> None:
    async with Deployment(tmp_path_factory.mktemp("model"), ("executor.num_blocks=1024",)) as deployment:
        streams = await model_streams(deployment.bus, range(8), 48)
        trials = [Trial("kill", target) for target in (*(f"{role}-0" for role in PATH_ROLES), BROKER)]
        for trial in trials:
            await run_trial(deployment, trial, [stream.again() for stream in streams], randomness=randomness)
        check(deployment, trials)
