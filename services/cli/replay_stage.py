"""`natterjack replay --stage`: one service of this build, fed alone with what the recorded one was sent."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer

from services.cli.recorded import EXIT_DIFFERENT, EXIT_SAME, unusable_unless_done, usable

Stage = Literal["scheduler", "tokenizer", "executor"]


def replay_stage(stage: Stage, file: Path, config: Path | None, overrides: Sequence[str], as_json: bool) -> int:
    """Print how the service's output compares with the recorded one; return the exit code."""
    if stage == "scheduler":
        return _replay_planner(file, as_json)
    from services.cli.foreground import run

    with usable():
        return run(unusable_unless_done(_replay_service(stage, file, config, overrides, as_json)))


async def _replay_service(
    stage: Stage, file: Path, config: Path | None, overrides: Sequence[str], as_json: bool
) -> int:
    import orjson

    from services.recording import stage_report
    from services.recording.capture_file import Capture

    capture = Capture(file)
    if stage == "tokenizer":
        from services.cli.replay_tokenizer import replay_tokenizer

        parts = await replay_tokenizer(capture, config, overrides)
    else:
        from services.cli.replay_executor import replay_executor

        parts = {"sequences": await replay_executor(capture, config, overrides)}
    shown = stage_report.as_json(stage, parts)
    typer.echo(orjson.dumps(shown).decode() if as_json else stage_report.as_text(parts))
    return EXIT_SAME if shown["equal"] else EXIT_DIFFERENT


def _replay_planner(file: Path, as_json: bool) -> int:
    import orjson

    from services.cli import planner_report
    from services.cli.planner_replay import replay_planner
    from services.recording.capture_file import Capture

    with usable():
        result = replay_planner(Capture(file))
    shown = planner_report.as_json(result)
    typer.echo(orjson.dumps(shown).decode() if as_json else planner_report.as_text(result))
    return EXIT_DIFFERENT if result.num_different else EXIT_SAME
