"""`natterjack serve ROLE`: one service in the foreground; what containers and other supervisors run."""

from importlib import import_module
from typing import Annotated, Literal

import typer

from services.cli.options import ConfigFile, Overrides

MODULE_BY_ROLE = {
    "gateway": "services.gateway.__main__",
    "tokenizer": "services.tokenizer.__main__",
    "scheduler": "services.scheduler.__main__",
    "cache_manager": "services.cache_manager.__main__",
    "executor": "services.executor.__main__",
    "console": "services.console.__main__",
}


def serve(
    role: Annotated[
        Literal["gateway", "tokenizer", "scheduler", "cache_manager", "executor", "console"],
        typer.Argument(help="Which service.", show_default=False),
    ],
    config: ConfigFile = None,
    overrides: Overrides = None,
    instance: Annotated[
        str | None, typer.Option("--instance", help="Its name; unique in the deployment.", show_default=False)
    ] = None,
) -> None:
    """Run one service until a signal stops it."""
    import signal

    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = ["--config", str(config)] if config else []
    for override in overrides or ():
        arguments += ["--set", override]
    if instance:
        arguments += ["--instance", instance]
    raise typer.Exit(import_module(MODULE_BY_ROLE[role]).main(arguments))
