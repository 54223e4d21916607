"""What a deployment holds that could leak: consumers, subscriptions, stream messages, open files, processes.

A census before the faults and one after them must agree, apart from what is kept on purpose: outputs, for as long as
`bus.out_max_age_s` says, and the registry's and the configurations' entries.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.faults.deployment import Deployment

SETTLE_S = 15.0
MORE_FILES = 6
"""A service may have opened so many more files: a library's, at first use."""


@dataclass(frozen=True)
class Census:
    """Counts at one moment; `files` and `processes` by instance."""

    consumers: dict[str, int]
    num_subscriptions: int
    messages: dict[str, int]
    files: dict[str, int]
    num_processes: int


async def census(deployment: Deployment) -> Census:
    """Count everything now."""
    async with httpx.AsyncClient(base_url=deployment.broker.monitoring_url) as client:
        account = (await client.get("/jsz", params={"streams": 1, "consumers": 1})).json()
        subscriptions = (await client.get("/subsz")).json()["num_subscriptions"]
    streams = account["account_details"][0]["stream_detail"]
    return Census(
        consumers={stream["name"]: stream["state"]["consumer_count"] for stream in streams},
        num_subscriptions=subscriptions,
        messages={stream["name"]: stream["state"]["messages"] for stream in streams},
        files={name: len(list(Path(f"/proc/{i.pid}/fd").iterdir())) for name, i in deployment.instances.items()},
        num_processes=len(_children()),
    )


def _children() -> list[int]:
    """Return this process's children, as the kernel counts them; zombies are children."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


async def leaks(deployment: Deployment, before: Census, num_requests: int) -> list[str]:
    """Return what is more than it was, once everything has had time to settle; empty when nothing is."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        found = _compare(before, await census(deployment), num_requests, deployment)
        if not found or time.monotonic() > deadline_s:
            return found
        await asyncio.sleep(0.5)


def _compare(before: Census, after: Census, num_requests: int, deployment: Deployment) -> list[str]:
    subjects = deployment.bus.subjects
    found = []
    if after.consumers != before.consumers:
        found.append(f"consumers {after.consumers}, before {before.consumers}")
    if after.num_subscriptions > before.num_subscriptions:
        found.append(f"{after.num_subscriptions} subscriptions, before {before.num_subscriptions}")
    if after.num_processes > before.num_processes:
        found.append(f"{after.num_processes} processes, before {before.num_processes}")
    found += [
        f"{number} open files in {name}, before {before.files[name]}"
        for name, number in after.files.items()
        if number > before.files[name] + MORE_FILES
    ]
    for stream in (subjects.work_stream, subjects.dead_stream):
        if after.messages[stream] > before.messages[stream]:
            found.append(f"{after.messages[stream]} messages in {stream}, before {before.messages[stream]}")
    if num_requests and not after.messages[subjects.out_stream]:
        found.append("no output is kept")
    return found
