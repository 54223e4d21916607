"""What the commands on recordings share: the words about a file that cannot be used, and a patient connection."""

import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from services.recording.comparison import Comparison
    from services.runtime.bus import Bus
    from services.runtime.settings import BusSettings

EXIT_SAME, EXIT_DIFFERENT, EXIT_UNUSABLE = 0, 1, 2
CONNECT_TIMEOUT_S = 5.0

LatencyTolerance: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--latency",
        metavar="FRACTION",
        min=0.0,
        help="Judge latencies and throughput too: 0.1 lets each percentile be 10 % worse.",
        show_default=False,
    ),
]


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """End the command with code 2 and the cause when a recording or a filter cannot be used."""
    from services.recording.capture_file import CaptureError
    from services.recording.filters import FilterError

    try:
        yield
    except (CaptureError, FilterError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from None


@contextlib.asynccontextmanager
async def running_deployment(settings: "BusSettings") -> "AsyncIterator[Bus]":
    """Yield the bus of the deployment that runs; nothing is started. Raises Unavailable."""
    from schemas.errors import Unavailable
    from services.cli.path import is_listening, quiet_tracing
    from services.runtime.bus import bus_url, open_bus
    from services.runtime.settings import masked

    if not await is_listening(settings):
        raise Unavailable(f"Nothing answers at {masked(bus_url(settings))}: 'natterjack up' starts a deployment.")
    patient = settings.model_copy(update={"connect_timeout_s": CONNECT_TIMEOUT_S})
    async with open_bus(patient, quiet_tracing(), name="cli") as bus:
        yield bus


def show(comparison: "Comparison", as_json: bool) -> int:
    """Print a comparison and return the exit code that it means."""
    import orjson

    from services.recording import report

    typer.echo(orjson.dumps(report.as_json(comparison)).decode() if as_json else report.as_text(comparison))
    if not comparison.is_usable:
        return EXIT_UNUSABLE
    return EXIT_DIFFERENT if comparison.differences else EXIT_SAME


async def unusable_unless_done(main: Coroutine[Any, Any, int]) -> int:
    """Return what `main` returns, and 2 with the cause when there is no deployment to ask: 1 means a difference."""
    from schemas.errors import NatterjackError
    from services.runtime.model_source import ModelSourceError
    from services.supervisor.events import DeploymentError

    try:
        return await main
    except NatterjackError as error:
        typer.echo(f"Error ({error.code}): {error.message}", err=True)
    except (DeploymentError, ModelSourceError) as error:
        typer.echo(f"Error: {error}", err=True)
    return EXIT_UNUSABLE
