"""`natterjack explain`: the messages of one request in order, and what they decided."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline
from services.cli.recorded import running_deployment, usable

if TYPE_CHECKING:
    from services.recording.explanation import Story


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST", help="Its id.", show_default=False)],
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="A recording that holds it.", show_default=False),
    ] = None,
    is_brief: Annotated[bool, typer.Option("--brief", help="Draw steady decoding steps together.")] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Tell what happened to one request: when, which instance, what was decided and why.

    Without a recording, the streams of the running deployment are asked: they hold its output, and its work item while
    it is queued. Exit code 1 when nothing is known of it.
    """
    from services.cli.foreground import run
    from services.recording.capture_file import Capture
    from services.recording.explanation import narrate

    if file is not None:
        with usable():
            raise typer.Exit(_tell(narrate(Capture(file).messages(), request_id), is_brief, as_json))
    settings = load_pipeline(config, overrides).settings.bus

    async def main() -> int:
        from services.recording.from_streams import read_request

        async with running_deployment(settings) as bus:
            return _tell(narrate(await read_request(bus, request_id), request_id), is_brief, as_json)

    raise typer.Exit(run(main()))


def _tell(story: "Story", is_brief: bool, as_json: bool) -> int:
    from dataclasses import asdict

    import orjson

    from services.recording.explanation import as_text

    typer.echo(orjson.dumps(asdict(story)).decode() if as_json else as_text(story, is_brief=is_brief))
    return 0 if story.events else 1
