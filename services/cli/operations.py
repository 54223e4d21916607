"""`natterjack drain`, `pause`, `resume` and `control`: commands to the services of the running deployment.

Exit codes: 0 when everyone asked has done it, 1 when someone refused, 2 for a target or a command that there is not, 3
when someone, or everyone, did not answer.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline

if TYPE_CHECKING:
    from pydantic import JsonValue

    from services.cli.command_round import Outcome
    from services.runtime.settings import BusSettings

Target = Annotated[str, typer.Argument(metavar="ROLE|INSTANCE", help="A role (all of its instances), or one instance.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long answers may take.")]


def drain(
    target: Target,
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="Wait so long for them to have left.")
    ] = 0.0,
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Let instances hand over what they do, and end; nothing that was accepted is lost.

    What keeps the process (the supervisor, Compose, Kubernetes) starts it again: instance by instance, that is a
    rolling restart.
    """
    settings = load_pipeline(config, overrides).settings.bus
    _round(settings, "drain", target, {}, as_json=as_json, timeout_s=timeout_s, wait_s=wait_s)


def pause(
    target: Target = "scheduler",
    hold: Annotated[
        bool, typer.Option("--hold", help="Stop running requests as well, where they are; else they finish.")
    ] = False,
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Begin no new request until `resume`: what is accepted waits, in order, and what runs finishes.

    Clients see their streams wait; deadlines and cancellations count as ever. Survives restarts of any service.
    """
    settings = load_pipeline(config, overrides).settings.bus
    arguments: dict[str, JsonValue] = {"in_flight": "hold" if hold else "finish"}
    _round(settings, "pause", target, arguments, as_json=as_json, timeout_s=timeout_s)


def resume(
    target: Target = "scheduler",
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """End a pause."""
    settings = load_pipeline(config, overrides).settings.bus
    _round(settings, "resume", target, {}, as_json=as_json, timeout_s=timeout_s)


def control(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="Such as flush-cache or set-log-level.")],
    target: Annotated[
        str, typer.Argument(metavar="[ROLE|INSTANCE]", help="Whom to tell; else every service that the command is for.")
    ] = "",
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="An argument, such as level=debug; repeatable."),
    ] = None,
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Tell services to do something: flush-cache, set-log-level --arg level=debug, pause, resume, drain."""
    settings = load_pipeline(config, overrides).settings.bus
    given = dict(_argument(text) for text in arguments or ())
    _round(settings, command.replace("-", "_"), target, given, as_json=as_json, timeout_s=timeout_s)


def _argument(text: str) -> "tuple[str, JsonValue]":
    """Read KEY=VALUE; a value that is JSON is taken as such, anything else as text."""
    import json

    key, separator, value = text.partition("=")
    if not separator or not key:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE.", param_hint="--arg")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _round(
    settings: "BusSettings",
    command: str,
    target: str,
    arguments: "dict[str, JsonValue]",
    *,
    as_json: bool,
    **times: Any,
) -> None:
    from services.cli.command_round import Order, carry_out
    from services.cli.foreground import run

    async def main() -> int:
        outcome = await carry_out(settings, Order(command, target, arguments, **times))
        _show(outcome, as_json)
        return outcome.exit_code

    raise typer.Exit(run(main()))


def _show(outcome: "Outcome", as_json: bool) -> None:
    if as_json:
        import orjson

        typer.echo(orjson.dumps(outcome.as_json()).decode())
        return
    for reply in outcome.replies:
        words = ", ".join(f"{key} {value}" for key, value in reply.result.items()) or "done"
        typer.echo(f"{reply.instance}: {words if reply.error is None else reply.error.message}", err=bool(reply.error))
    if outcome.error:
        typer.echo(f"Error: {outcome.error}", err=True)
