"""`natterjack up`: the whole deployment on this machine, in the foreground."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from services.cli.options import ConfigFile, Overrides, load_pipeline

if TYPE_CHECKING:
    from services.cli.progress import StageDisplay
    from services.supervisor.pipeline import PipelineSettings
    from services.supervisor.supervisor import Deployment, Supervisor


def up(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Start everything on this machine: an embedded nats-server and all services. Ctrl-C stops it."""
    loaded = load_pipeline(config, overrides)
    from schemas.control import ROLES
    from services.cli.foreground import run
    from services.cli.progress import StageDisplay
    from services.supervisor.supervisor import Plan, Supervisor

    display = StageDisplay()
    plan = Plan(loaded.settings, config and Path(config), tuple(overrides or ()), roles=(*ROLES, "console"))
    supervisor = Supervisor(plan, display.on_event)
    raise typer.Exit(run(_up(supervisor, display, loaded.settings), supervisor.kill))


async def _up(supervisor: "Supervisor", display: "StageDisplay", settings: "PipelineSettings") -> int:
    import asyncio
    import time

    started_s = time.monotonic()
    with display:
        async with supervisor.running() as deployment:
            display.settle()
            typer.echo(_greeting(deployment, settings, time.monotonic() - started_s))
            await asyncio.Event().wait()
    return 0


def _greeting(deployment: "Deployment", settings: "PipelineSettings", took_s: float) -> str:
    from services.runtime.settings import masked

    model, prefix, http = settings.model.name, settings.bus.prefix, deployment.http_url
    nats = masked(deployment.bus_url)
    console = f"  Console  {deployment.console_url}\n" if deployment.console_url else ""
    return f"""
Ready after {took_s:.1f} s, serving '{model}'.

  HTTP     {http}/v1   (OpenAI-compatible)
  NATS     {nats}   (requests: {prefix}.v1.generate.{model})
{console}  Logs     {deployment.state.logs}

Try it:
  curl {http}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a natterjack?"}}]}}'

Ctrl-C stops it."""
