"""`natterjack record`: a passive recording of a running deployment's traffic."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from services.cli.options import ConfigFile, Overrides, load_pipeline
from services.cli.recorded import running_deployment, usable

if TYPE_CHECKING:
    from services.recording.session import Session, Wish
    from services.runtime.settings import BusSettings

POLL_S = 0.1
NICENESS = 10
"""That of the services; more would make the arrival times those of a process that waited."""


def record(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it, such as traffic.jsonl.zst.")
    ],
    request: Annotated[
        str | None,
        typer.Option("--request", metavar="ID", help="One finished request, from the streams.", show_default=False),
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="FILTER",
            help="request=ID, or a kind such as step_plan; repeatable.",
            show_default=False,
        ),
    ] = None,
    redact: Annotated[
        Literal["none", "text", "ids"], typer.Option("--redact", help="Leave out text; ids: token ids as well.")
    ] = "none",
    duration_s: Annotated[
        float | None, typer.Option("--duration", metavar="SECONDS", min=0.0, help="Stop then.", show_default=False)
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option("--requests", metavar="N", min=1, help="Stop when N requests have ended.", show_default=False),
    ] = None,
    label: Annotated[str, typer.Option("--label", help="A word about it, kept in the file.", show_default=False)] = "",
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Record what the parts of a running deployment say to each other, until Ctrl-C.

    The deployment notices nothing of it. What is missing from the recording is counted and said at the end.
    """
    settings = load_pipeline(config, overrides).settings.bus
    from services.cli.foreground import run
    from services.recording.filters import parse_filters
    from services.recording.session import Wish

    with usable():
        wish = Wish(output, parse_filters(filters or ()), redact, label)
    if request is not None:
        raise typer.Exit(run(_record_one(settings, request, wish)))
    raise typer.Exit(run(_record(settings, wish, duration_s, num_requests)))


async def _record_one(settings: "BusSettings", request_id: str, wish: "Wish") -> int:
    from services.recording.session import record_from_streams

    async with running_deployment(settings) as bus:
        number = await record_from_streams(bus, request_id, wish)
    if number == 0:
        typer.echo(f"The streams hold nothing of {request_id!r}: its output expired, or the id is wrong.", err=True)
        return 1
    typer.echo(f"{wish.path}: {number} messages of {request_id}.", err=True)
    return 0


async def _record(settings: "BusSettings", wish: "Wish", duration_s: float | None, num_requests: int | None) -> int:
    from services.recording.session import recording

    with lower_priority(NICENESS):
        async with running_deployment(settings) as bus, recording(bus, wish) as session:
            typer.echo(f"Recording to {wish.path}; Ctrl-C ends it.", err=True)
            try:
                async with asyncio.timeout(duration_s):
                    await _until(session, num_requests)
            except (TimeoutError, asyncio.CancelledError):  # the duration is over, or the person has enough
                pass
    typer.echo(f"{wish.path}: {_summary(session.closing)}", err=True)
    return 0


@contextlib.contextmanager
def lower_priority(niceness: int) -> Iterator[None]:
    """Run the block at this niceness at least, and so that waking up takes the processor from nobody.

    A process that may go back to its own priority does so afterwards.
    """
    import os

    before, policy = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    os.setpriority(os.PRIO_PROCESS, 0, max(before, niceness))
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):  # for the command itself it does not matter: it ends
            os.sched_setscheduler(0, policy, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, 0, before)


async def _until(session: "Session", num_requests: int | None) -> None:
    recorder = session.recorder
    while recorder.error is None and (num_requests is None or recorder.totals.num_ended < num_requests):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)  # the count belongs to the writing thread, which shall not have to tell anybody


def _summary(closing: dict[str, Any]) -> str:
    text = f"{closing['num_messages']} messages, {closing['num_requests_ended']} requests ended"
    dropped, missing = sum(closing["num_dropped"].values()), sum(closing["num_missing"].values())
    if dropped or missing or closing["num_reconnects"]:
        return (
            f"{text}. INCOMPLETE: {dropped} messages were dropped because the writer could not keep up, at least "
            f"{missing} numbered ones never arrived, and the connection was lost {closing['num_reconnects']} times."
        )
    return f"{text}, nothing missing."
