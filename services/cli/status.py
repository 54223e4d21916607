"""`natterjack status`: whether every service of the path is ready."""

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline

if TYPE_CHECKING:
    from services.cli.roll_call import RollCall


def status(
    wait_s: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="Wait so long for it to become ready.")
    ] = 0.0,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Show the services of the running deployment; exit 0 only when every one of the path is ready."""
    settings = load_pipeline(config, overrides).settings
    from services.cli.foreground import run
    from services.cli.roll_call import call_until_ready

    async def main() -> int:
        result = await call_until_ready(settings.bus, wait_s)
        typer.echo(_json(result) if as_json else _table(result))
        return 0 if result.is_ready else 1

    raise typer.Exit(run(main()))


def _json(result: "RollCall") -> str:
    import orjson

    return orjson.dumps(result.as_json()).decode()


def _table(result: "RollCall") -> str:
    lines = [f"{'INSTANCE':18} {'STATE':10} {'MODEL':12} {'PID':>8}  DETAIL"]
    for entry in result.present:
        words = [] if entry.state == "ready" else [entry.stage, f"{entry.progress:.0%}" if entry.progress else ""]
        detail = ", ".join(word for word in (*words, entry.detail) if word)
        lines.append(f"{entry.instance:18} {entry.state:10} {entry.model:12} {entry.pid:8}  {detail}".rstrip())
    lines += [result.error] if result.error else []
    lines.append("Ready." if result.is_ready else f"Not ready: {', '.join(result.missing)}.")
    return "\n".join(lines if result.present else lines[1:])
