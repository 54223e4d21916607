"""`python -m tests.faults`: every fault on every service, over hundreds of streams. Prints a table; exit code 1 if any
stream is wrong.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from schemas.control import PATH_ROLES
from tests.faults.deployment import ECHO, REPLICAS, Deployment
from tests.faults.faults import BROKER, FAULTS
from tests.faults.http_streams import http_streams
from tests.faults.leaks import census, leaks
from tests.faults.streams import echo_streams, model_streams
from tests.faults.trial import HEADINGS, ClientStream, Trial, run_trial, summary


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--streams", type=int, default=40, help="concurrent streams of one trial")
    parser.add_argument("--trials", type=int, default=5, help="trials of each fault on each service")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a stream, about")
    parser.add_argument("--faults", default="kill,terminate,pause,cut", help="of " + ", ".join(FAULTS))
    parser.add_argument("--targets", default=",".join((*PATH_ROLES, "gateway", BROKER)), help="roles, and the broker")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long pauses and cuts last")
    parser.add_argument("--model", action="store_true", help="the real model, not the echo engine")
    parser.add_argument("--single", action="store_true", help="one instance of each service, not two")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the moments at which faults come")
    parser.add_argument("--directory", type=Path, help="where streams and logs go; a temporary one if not given")
    return parser.parse_args()


async def main(chosen: argparse.Namespace, directory: Path) -> int:
    randomness = random.Random(chosen.seed)
    print(f"seed {chosen.seed}\n{HEADINGS}", flush=True)
    overrides = () if chosen.model else ECHO
    trials: list[Trial] = []
    async with Deployment(directory, overrides, {} if chosen.single else REPLICAS) as deployment:
        await run_trial(
            deployment,
            Trial("nothing", BROKER),
            await _streams(deployment, BROKER, range(4), chosen),
            randomness=randomness,
        )
        before = await census(deployment)
        for trial, role in planned(deployment, chosen):
            numbers = range(len(trials) * chosen.streams, (len(trials) + 1) * chosen.streams)
            streams = await _streams(deployment, role, numbers, chosen)
            trials.append(await run_trial(deployment, trial, streams, randomness=randomness))
            print(trial.row(), flush=True)
        leaked = await leaks(deployment, before, len(trials) * chosen.streams)
    print(f"\nall trials of a fault on a role\n{HEADINGS}\n{summary(trials)}")
    problems = [f"{trial.fault} {trial.target}: {problem}" for trial in trials for problem in trial.problems]
    problems += [f"leaked: {what}" for what in leaked]
    print("\n".join(problems) or "nothing lost, repeated, different, hung or leaked")
    return 1 if problems else 0


def planned(deployment: Deployment, chosen: argparse.Namespace) -> Iterator[tuple[Trial, str]]:
    """Yield every trial with the role that it hits.

    A broker is neither cut off nor asked to hand over; streams over HTTP are the echo engine's.
    """
    for fault in chosen.faults.split(","):
        for target in chosen.targets.split(","):
            if (target == BROKER and fault in ("cut", "terminate")) or (target == "gateway" and chosen.model):
                continue
            for number in range(chosen.trials):
                duration_s = chosen.seconds * (fault in ("pause", "cut"))
                yield Trial(fault, _instance(deployment, target, number), duration_s), target


async def _streams(
    deployment: Deployment, target: str, numbers: range, chosen: argparse.Namespace
) -> Sequence[ClientStream]:
    """Return the streams of a trial: over HTTP when a gateway is hit, of the real model if it is wished."""
    if target == "gateway":
        urls = [instance.http_url for instance in deployment.of("gateway")]
        return http_streams(urls, numbers, chosen.tokens)
    if chosen.model:
        return await model_streams(deployment.bus, numbers, chosen.tokens)
    return echo_streams(numbers, chosen.tokens)


def _instance(deployment: Deployment, target: str, number: int) -> str:
    """Return the instance to hit: the replicas in turn."""
    if target == BROKER:
        return BROKER
    instances = [instance.name for instance in deployment.instances.values() if instance.role == target]
    return instances[number % len(instances)]


if __name__ == "__main__":
    chosen = options()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(asyncio.run(main(chosen, chosen.directory or Path(temporary))))
