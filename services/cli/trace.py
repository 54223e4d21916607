"""`natterjack trace`: one request's trace as a waterfall, as a console remembers it."""

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline

if TYPE_CHECKING:
    from schemas.telemetry import TraceReply
    from services.runtime.bus import Bus

EXIT_UNKNOWN, EXIT_NO_CONSOLE = 1, 3
TIMEOUT_S = 5.0


def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="Its id, its answer's (chatcmpl-…), or its trace's.", show_default=False
        ),
    ],
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Show where the time of one recent request went, and what was decided about it.

    A running console is asked: it remembers the last `console.max_requests`. Exit code 1 when it knows nothing of the
    request, 3 when no console runs.
    """
    settings = load_pipeline(config, overrides).settings.bus
    from services.cli.foreground import run
    from services.cli.recorded import running_deployment

    async def main() -> int:
        async with running_deployment(settings) as bus:
            reply = await _ask(bus, request_id)
        if reply is None:
            typer.echo(
                f"No console answers, and traces are kept nowhere else. Start one ('natterjack up' does unless "
                f"console.enabled is false, or 'natterjack serve console'); 'natterjack explain {request_id}' "
                "tells what the streams still hold of the request.",
                err=True,
            )
            return EXIT_NO_CONSOLE
        return _show(reply, as_json)

    raise typer.Exit(run(main()))


async def _ask(bus: "Bus", request_id: str) -> "TraceReply | None":
    """Return a console's answer; None when there is no console."""
    from schemas.errors import Unavailable
    from schemas.telemetry import TraceQuery, TraceReply

    try:
        return await bus.request(bus.subjects.trace(), TraceQuery(request=request_id), TraceReply, timeout_s=TIMEOUT_S)
    except Unavailable:
        return None


def _show(reply: "TraceReply", as_json: bool) -> int:
    if as_json:
        typer.echo(reply.model_dump_json())
    elif reply.rows:
        from rich.console import Console

        from services.cli.trace_view import trace_view

        console = Console()
        console.print(trace_view(reply, console.width))
    else:
        typer.echo(
            f"The console knows nothing of {reply.request}: it remembers the latest requests since its start. "
            f"'natterjack explain {reply.request}' tells what the streams still hold.",
            err=True,
        )
    return 0 if reply.rows else EXIT_UNKNOWN
