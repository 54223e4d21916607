"""`natterjack config`: what is configured, whether it is right, and what differs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline

if TYPE_CHECKING:
    from services.supervisor.pipeline import PipelineSettings

config = typer.Typer(help="Show, check and compare configurations.", no_args_is_help=True)


@config.command()
def show(file: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every setting with its value and where it came from; secrets are masked."""
    import orjson

    shown = load_pipeline(file, overrides).shown()
    if as_json:
        values = {key: {"value": item.value, "source": item.source} for key, item in shown.items()}
        typer.echo(orjson.dumps(values, option=orjson.OPT_INDENT_2).decode())
        return
    width = max(map(len, shown))
    for key, item in shown.items():
        value = "null" if item.value is None else str(item.value)
        typer.echo(f"{key:{width}}  {value}" + ("" if item.source == "default" else f"  [{item.source}]"))


@config.command()
def check(
    path: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Pipeline file (YAML).", show_default=False)
    ] = None,
    file: ConfigFile = None,
    overrides: Overrides = None,
    file_only: Annotated[
        bool, typer.Option("--file-only", help="Do not ask whether this machine can do what is wished for.")
    ] = False,
) -> None:
    """Validate the whole pipeline file with environment and overrides; exit 2 when something is wrong.

    That is also an option that the engine, the model or this machine's processor and memory cannot honour.
    """
    if path and file:
        typer.echo("Name the file once: as an argument or with -c.", err=True)
        raise typer.Exit(2)
    settings = load_pipeline(path or file, overrides).settings
    told = [] if file_only else _capabilities(settings)
    typer.echo("\n".join([f"{path or file or 'The configuration'} is right.", *told]))


def _capabilities(settings: "PipelineSettings") -> list[str]:
    """Return what an executor here would do; exit with code 2 and the reason when it would refuse."""
    from importlib import import_module

    executor = import_module("services.executor.capabilities")  # with the engines, which nothing else here needs
    try:
        told: list[str] = executor.check_machine(settings.model, settings.executor)
    except ValueError as error:
        typer.echo(f"An executor on this machine would refuse this configuration:\n{error}", err=True)
        raise typer.Exit(2) from None
    return told


@config.command()
def diff(
    ours: Annotated[str, typer.Argument(metavar="A", help="FILE, recording, or nats://HOST:PORT[/PREFIX].")],
    other: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compare two configurations: pipeline files (with this environment), recordings, running deployments.

    Of what runs, the build is compared too: version, commit, schema versions, CPU features, kernels.
    Exit code 0: no differences, 1: some, 2: a side cannot be read.
    """
    import orjson

    from services.cli.config_sides import read_side
    from services.cli.foreground import run
    from services.cli.recorded import unusable_unless_done
    from services.recording import configuration

    async def main() -> int:
        a, b = await read_side(ours, overrides or ()), await read_side(other, overrides or ())
        found = configuration.diff(a, b)
        shown = orjson.dumps(configuration.as_json(found)).decode() if as_json else configuration.as_text(found, a, b)
        typer.echo(shown)
        return 1 if found else 0

    raise typer.Exit(run(unusable_unless_done(main())))
