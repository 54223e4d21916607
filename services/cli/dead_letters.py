"""`natterjack dead-letters`: what the deployment gave up, why, and another try."""

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import AsJson, ConfigFile, Overrides, load_pipeline

if TYPE_CHECKING:
    from schemas.control import DeadLetter
    from schemas.generation import WorkItem
    from services.runtime.bus import Bus

dead_letters = typer.Typer(help="Requests that were given up, with the reason.", no_args_is_help=True)

RequestId = Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id, as `list` shows it.")]


@dead_letters.command("list")
def list_letters(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List the dead letters, oldest first."""
    settings = load_pipeline(config, overrides).settings.bus
    from services.cli.foreground import run
    from services.cli.recorded import running_deployment

    async def main() -> int:
        async with running_deployment(settings) as bus:
            letters = await _letters(bus)
        if as_json:
            typer.echo("[" + ",".join(letter.model_dump_json() for letter in letters) + "]")
            return 0
        for letter in letters:
            typer.echo(_line(letter))
        if not letters:
            typer.echo("No dead letters.", err=True)
        return 0

    raise typer.Exit(run(main()))


@dead_letters.command()
def show(request: RequestId, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Print a dead letter with everything that was asked, as JSON."""
    settings = load_pipeline(config, overrides).settings.bus
    from services.cli.foreground import run
    from services.cli.recorded import running_deployment

    async def main() -> int:
        async with running_deployment(settings) as bus:
            letter = await _find(bus, request)
        if letter is None:
            return _unknown(request)
        typer.echo(letter.model_dump_json(indent=2))
        return 0

    raise typer.Exit(run(main()))


@dead_letters.command()
def replay(request: RequestId, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Put a request into the work queue again, under a new id, and print where its output will be.

    Its tokens are those that it would have had: the seed is in the letter.
    """
    settings = load_pipeline(config, overrides).settings.bus
    from services.cli.foreground import run
    from services.cli.recorded import running_deployment

    async def main() -> int:
        async with running_deployment(settings) as bus:
            letter = await _find(bus, request)
            if letter is None:
                return _unknown(request)
            if letter.work is None:
                typer.echo(f"Error: {request!r} could not be read, so it cannot be replayed.", err=True)
                return 1
            work = await _submit_again(bus, letter.work)
            typer.echo(f"{work.request_id}: its output is {bus.subjects.out(work.request_id)}")
        return 0

    raise typer.Exit(run(main()))


async def _letters(bus: "Bus") -> "list[DeadLetter]":
    from schemas.control import DeadLetter
    from services.runtime.transport import NoStream

    try:
        found = await bus.read(bus.subjects.dead_stream, bus.subjects.dead_all, DeadLetter)
    except NoStream:  # no service has ever started here
        return []
    return [stored.message for stored in found]


async def _find(bus: "Bus", request_id: str) -> "DeadLetter | None":
    """Return the newest letter about a request."""
    letters = [letter for letter in await _letters(bus) if letter.request_id == request_id]
    return letters[-1] if letters else None


async def _submit_again(bus: "Bus", work: "WorkItem") -> "WorkItem":
    import time
    import uuid

    from schemas.subjects import subject_token

    request_id, now_s = f"replay-{uuid.uuid4().hex}", time.time()
    output = work.output.model_copy(
        update={"request_id": request_id, "created_s": now_s, "reply": None, "traceparent": None}
    )
    changes = {"request_id": request_id, "created_s": now_s, "deadline_s": None, "output": output}
    again = work.model_copy(update=changes)
    await bus.append(bus.subjects.work(work.model, work.priority), again, message_id=subject_token(request_id))
    return again


def _line(letter: "DeadLetter") -> str:
    from datetime import UTC, datetime

    when = datetime.fromtimestamp(letter.died_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{when}  {letter.request_id}  {letter.num_delivered} attempts  {letter.reason}"


def _unknown(request_id: str) -> int:
    typer.echo(f"Error: there is no dead letter of {request_id!r}; see 'natterjack dead-letters list'.", err=True)
    return 1
