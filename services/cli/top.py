"""`natterjack top`: the running deployment, live in the terminal."""

from typing import Annotated

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline


def top(
    is_once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Watch services, rates, latencies, queue and KV blocks; Ctrl-C ends it.

    Needs no console: every service tells its figures to whoever listens. With --json, or where the output is no
    terminal, one picture is printed.
    """
    settings = load_pipeline(config, overrides).settings.bus
    from rich.console import Console

    from services.cli.foreground import run
    from services.cli.recorded import running_deployment
    from services.cli.top_view import top_view
    from services.cli.watching import one_overview, overviews

    console = Console()

    async def main() -> int:
        async with running_deployment(settings) as bus:
            if is_once or as_json or not console.is_terminal:
                seen = await one_overview(bus)
                if as_json:
                    typer.echo(seen.model_dump_json())
                else:
                    console.print(top_view(seen))
                return 0 if seen.health != "bad" else 1
            from rich.live import Live

            with Live(console=console, screen=True, auto_refresh=False) as live:
                async for seen in overviews(bus):
                    live.update(top_view(seen), refresh=True)
        return 0

    raise typer.Exit(run(main()))
