"""`natterjack replay`: send recorded requests again, and see whether the outcome is the same."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline
from services.cli.recorded import LatencyTolerance, show, unusable_unless_done

ORIGINAL, MAXIMUM = "original", "max"


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recording.", show_default=False)],
    speed: Annotated[
        str,
        typer.Option("--speed", metavar="original|N|max", help="The recorded spacing, N times as fast, or at once."),
    ] = ORIGINAL,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="URL", help="NATS server of the deployment to ask.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Record the replay there.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Ask this model, not the recorded one.", show_default=False)
    ] = None,
    max_concurrent: Annotated[
        int, typer.Option("--concurrency", min=1, help="Requests at a time with --speed max.")
    ] = 32,
    limit_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="How long one request may take.")
    ] = 300.0,
    stage: Annotated[
        Literal["scheduler", "tokenizer", "executor"] | None,
        typer.Option("--stage", help="Feed this service alone with what it was sent, without a deployment."),
    ] = None,
    latency: LatencyTolerance = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Send the requests of a recording again and compare what comes out with what was recorded.

    Exit code 0: the same, 1: different, 2: it could not be done. Without --against, the running deployment is asked;
    where there is none, one is started for the call. With --stage, one service of this build is fed alone, in memory:
    configured as it was recorded, unless -c, the environment or --set say otherwise.
    """
    if stage is not None:
        from services.cli.replay_stage import replay_stage

        raise typer.Exit(replay_stage(stage, file, config, overrides or (), as_json))
    overrides = [*(overrides or ()), *([f"bus.url={against}"] if against else ())]
    if model is not None:
        overrides.append(f"model.name={model}")
    settings = load_pipeline(config, overrides).settings
    from services.cli.foreground import run
    from services.cli.path import PathToModel
    from services.cli.replay_run import Pace, replay_and_compare

    pace = Pace(_speed(speed), max_concurrent, limit_s)
    path = PathToModel(settings, config, tuple(overrides))

    async def main() -> int:
        comparison = await replay_and_compare(file, path, pace, output=output, model=model, latency=latency)
        return show(comparison, as_json)

    raise typer.Exit(run(unusable_unless_done(main()), path.kill))


def _speed(text: str) -> float | None:
    """Return how many times as fast as recorded; None: as fast as possible."""
    if text == MAXIMUM:
        return None
    try:
        speed = 1.0 if text == ORIGINAL else float(text)
    except ValueError:
        speed = 0.0
    if speed <= 0:
        raise typer.BadParameter("write 'original', 'max' or a number above 0.", param_hint="--speed")
    return speed
