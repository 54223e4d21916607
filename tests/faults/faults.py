"""The faults, by name: each hits one instance, or the broker, once. What follows is the deployment's matter."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from tests.faults.deployment import Deployment

BROKER = "broker"
Fault = Callable[[Deployment, str, float], Awaitable[None]]
"""(deployment, instance or BROKER, for how long in seconds)."""


async def nothing(deployment: Deployment, target: str, duration_s: float) -> None:
    """What the others are compared with."""


async def kill(deployment: Deployment, target: str, duration_s: float) -> None:
    """SIGKILL; it is started again at once, as a supervisor does."""
    if target == BROKER:
        deployment.broker.kill()
        await asyncio.sleep(0.2)
        await asyncio.to_thread(deployment.broker.start)
    else:
        deployment.instances[target].signal(signal.SIGKILL)


async def terminate(deployment: Deployment, target: str, duration_s: float) -> None:
    """SIGTERM: one step of a rolling restart."""
    deployment.instances[target].signal(signal.SIGTERM)


async def pause(deployment: Deployment, target: str, duration_s: float) -> None:
    """SIGSTOP, and SIGCONT later: the process wakes up believing that no time has passed."""
    if target == BROKER:
        process = deployment.broker.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(duration_s)
        os.kill(process.pid, signal.SIGCONT)
        return
    deployment.instances[target].signal(signal.SIGSTOP)
    await asyncio.sleep(duration_s)
    deployment.instances[target].signal(signal.SIGCONT)


async def cut(deployment: Deployment, target: str, duration_s: float) -> None:
    """Cut the network between one service and the broker, and mend it later: what was sent comes late."""
    network = deployment.instances[target].network
    network.cut()
    await asyncio.sleep(duration_s)
    network.mend()


FAULTS: dict[str, Fault] = {"nothing": nothing, "kill": kill, "terminate": terminate, "pause": pause, "cut": cut}
