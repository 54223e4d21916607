"""Which processes a deployment consists of, and the argument list of each."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from schemas.control import ROLES, Role
from services.runtime.settings import child_environment
from services.supervisor.child import Program
from services.supervisor.pipeline import PipelineSettings

STOP_ORDER: tuple[frozenset[str], ...] = (
    frozenset({"gateway", "console"}),
    frozenset({"tokenizer", "scheduler", "executor", "cache_manager"}),
)
"""The door closes first; what finishes the requests inside goes together."""
CONSOLE_NICE = 5
"""Below the services that requests need; not the lowest, or it would seem dead on a busy machine."""
MAX_NICE = 19


def role_of(instance: str) -> str:
    """Return the role of an instance that `service_programs` has named."""
    return instance.rpartition("-")[0]


def service_programs(
    settings: PipelineSettings,
    roles: Iterable[Role],
    *,
    file: Path | None,
    overrides: Sequence[str],
    bus_url: str,
) -> list[Program]:
    """Return the services' programs; the bus's URL, which may hold a password, travels in the environment."""
    wanted = frozenset(roles)
    arguments: list[str] = ["-c", str(file.absolute())] if file else []
    for override in overrides:
        if override.partition("=")[0].strip() != "bus.url":
            arguments += ["--set", override]
    environment = child_environment({"bus.url": bus_url})
    nices: dict[Role, int] = {"executor": 0, "console": min(settings.supervisor.nice + CONSOLE_NICE, MAX_NICE)}
    replicas = {"tokenizer": settings.tokenizer.replicas, "executor": settings.executor.replicas}
    return [
        Program(
            instance := f"{role}-{number}",
            (sys.executable, "-P", "-m", f"services.{role}", *arguments, "--instance", instance),
            environment,
            nices.get(role, settings.supervisor.nice),
        )
        for role in (*ROLES, "console")
        if role in wanted
        for number in range(replicas.get(role, 1))
    ]
