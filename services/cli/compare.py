"""`natterjack compare`: whether two recordings have the same outcomes."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli.options import AsJson
from services.cli.recorded import LatencyTolerance, show, usable


def compare(
    expected: Annotated[Path, typer.Argument(metavar="A", help="The recording that is right.", show_default=False)],
    found: Annotated[Path, typer.Argument(metavar="B", help="The recording to judge.", show_default=False)],
    latency: LatencyTolerance = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Compare what the schedulers decided too, within --tolerance.")
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="FRACTION",
            min=0.0,
            help="How far the figures of two schedules may be apart; 0: every step must be the same.",
        ),
    ] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Compare two recordings request by request.

    Token ids, text, finish reasons, usage and errors must be the same; with --schedule, order of admission, batches,
    preemptions and cached tokens too. Exit code 0: they are, 1: different, 2: a file cannot be used, or no request of A
    has a recorded end. How two different engines' tokens differ is told and not judged: none promises another's.
    """
    from services.cli.replay_run import compare_recordings

    with usable():
        comparison = compare_recordings(expected, found, latency, tolerance if schedule else None)
    raise typer.Exit(show(comparison, as_json))
