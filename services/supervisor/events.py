"""What the supervisor tells whoever started it: progress by stage, and the two ways in which it gives up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Happening = Literal["starting", "ready", "restarting", "stopping", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class StageEvent:
    """News of one part of the deployment: `nats-server`, `model` or an instance such as `executor-0`.

    `progress` is 0..1 within `stage`, None where there is no measure; `detail` is for a person.
    """

    name: str
    happening: Happening
    stage: str = ""
    progress: float | None = None
    detail: str = ""


OnEvent = Callable[[StageEvent], None]


class DeploymentError(Exception):
    """The deployment cannot start or cannot go on; the message names the cause and what to do."""

    exit_code = 1


class PortTaken(DeploymentError):
    """Somebody else listens on a port that the deployment needs."""


class StateDirTaken(DeploymentError):
    """Another deployment uses the state directory."""
