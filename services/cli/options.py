"""Options that several commands share, and how a command reads the configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from services.runtime.settings import Loaded
    from services.supervisor.pipeline import PipelineSettings

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Pipeline file (YAML).", show_default=False),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; repeatable.", show_default=False),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
MaxTokens: TypeAlias = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate at most.")]
Temperature: TypeAlias = Annotated[
    float, typer.Option("--temperature", min=0.0, max=2.0, help="0 always takes the likeliest token.")
]
Seed: TypeAlias = Annotated[
    int | None, typer.Option("--seed", help="The same seed draws the same tokens.", show_default=False)
]


def load_pipeline(file: Path | None, overrides: Sequence[str] | None) -> "Loaded[PipelineSettings]":
    """Return the whole pipeline's settings; exit with code 2 and every problem named when they are wrong."""
    from services.runtime.settings import SettingsError, load_settings
    from services.supervisor.pipeline import PipelineSettings

    try:
        return load_settings(PipelineSettings, file=file, overrides=overrides or ())
    except SettingsError as error:
        typer.echo(f"Configuration error:\n{error}", err=True)
        raise typer.Exit(error.exit_code) from None
