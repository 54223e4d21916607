"""A shadow from its beginning to its report: both buses, the live table, the metrics. An edge."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from schemas.control import PATH_ROLES
from schemas.errors import Unavailable
from schemas.subjects import Subjects, is_prefix
from services.cli.record import lower_priority
from services.cli.recorded import EXIT_DIFFERENT, EXIT_SAME, EXIT_UNUSABLE, running_deployment
from services.recording.agreement import Agreement, Verdict, as_json, as_rows
from services.recording.comparison import Rules
from services.recording.engines import are_same, engines_of
from services.recording.outcomes import Outcome
from services.recording.report import described
from services.recording.shadowing import Shadow, ShadowLimits
from services.runtime.bus import Bus
from services.runtime.metrics import Metrics
from services.runtime.metrics_page import metrics_page
from services.runtime.probe_server import Page, probe_server
from services.runtime.registry import Registry
from services.runtime.settings import BusSettings

NICENESS = 10
SETTLE_S = 5.0
REFRESH_S = 0.25
READY_TIMEOUT_S = 3.0
METRICS_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the person asked for."""

    prefix: str
    limits: ShadowLimits
    duration_s: float | None = None
    num_requests: int | None = None
    metrics_port: int | None = None


def check_prefix(prefix: str, settings: BusSettings) -> None:
    """Raise typer.BadParameter for what is no prefix, or the live pipeline's own."""
    if not is_prefix(prefix):
        raise typer.BadParameter("a prefix is 1 to 32 of a-z, 0-9, '_' and '-'.", param_hint="--to")
    if prefix == settings.prefix:
        raise typer.BadParameter(f"{prefix!r} is the live pipeline itself; name another one.", param_hint="--to")


async def run_shadow(settings: BusSettings, wishes: Wishes, as_json_object: bool) -> int:
    """Mirror until the person has enough, and print the report; returns the exit code. Raises Unavailable."""
    async with running_deployment(settings) as live:
        other = Bus(live.transport, Subjects(wishes.prefix), live.tracing)
        engines = [await _engines(bus) for bus in (live, other)]
        agreement = Agreement(Rules(is_same_engine=are_same(*engines)))
        meters = ShadowMeters(agreement)
        with lower_priority(NICENESS):
            async with Shadow(live, other, wishes.limits, agreement, meters.compared) as shadow:
                meters.watch(shadow)
                async with _shown(shadow, wishes, meters):
                    await _until_enough(shadow, wishes)
                    await shadow.settle(SETTLE_S)
    _report(agreement, as_json_object)
    if agreement.num_compared == 0:
        return EXIT_UNUSABLE
    return EXIT_DIFFERENT if agreement.verdicts["different"] else EXIT_SAME


async def _engines(bus: Bus) -> frozenset[str]:
    """Return the engines of a pipeline; raises Unavailable when it is not there as a whole."""
    async with Registry(bus) as registry:
        try:
            await registry.wait_ready(PATH_ROLES, READY_TIMEOUT_S)
        except Unavailable as error:
            raise Unavailable(f"The pipeline under {bus.subjects.prefix!r}: {error.message}") from None
        return engines_of(registry.healthy("executor"))


async def _until_enough(shadow: Shadow, wishes: Wishes) -> None:
    try:
        async with asyncio.timeout(wishes.duration_s):
            while wishes.num_requests is None or shadow.agreement.num_compared < wishes.num_requests:  # noqa: ASYNC110
                await asyncio.sleep(REFRESH_S / 2)  # the count is the mirror's own, which tells nobody
    except (TimeoutError, asyncio.CancelledError):  # the duration is over, or the person has enough
        pass


@contextlib.asynccontextmanager
async def _shown(shadow: Shadow, wishes: Wishes, meters: "ShadowMeters") -> AsyncIterator[None]:
    """Draw the live table on a terminal, and serve the metrics where that is wanted."""
    console = Console(file=sys.stderr)
    async with contextlib.AsyncExitStack() as stack:
        where = ""
        if wishes.metrics_port is not None:
            pages = {"/metrics": lambda accept: Page.of(*metrics_page(meters.metrics, accept))}
            port = await stack.enter_async_context(probe_server(METRICS_HOST, wishes.metrics_port, pages))
            where = f"; metrics on http://{METRICS_HOST}:{port}/metrics"
        share = f"{wishes.limits.fraction:.2%} of the requests"
        console.print(Text(f"Mirroring {share} to {wishes.prefix!r}{where}; Ctrl-C ends it."), soft_wrap=True)
        if console.is_terminal:
            live = Live(console=console, get_renderable=lambda: _table(shadow), refresh_per_second=1 / REFRESH_S)
            stack.enter_context(live)
        yield


def _table(shadow: Shadow) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in as_rows(shadow.agreement, shadow.num_open):
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _report(agreement: Agreement, as_json_object: bool) -> None:
    if as_json_object:
        typer.echo(orjson.dumps(as_json(agreement)).decode())
        return
    for difference in agreement.differences:
        typer.echo("\n".join(described(difference)))
    rows = as_rows(agreement, 0)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:{width}}  {value}")


class ShadowMeters:
    """The metrics of a shadow; everything but the latencies is read from its agreement."""

    def __init__(self, agreement: Agreement) -> None:
        self.metrics = Metrics()
        self._seconds = {side: self.metrics.histogram("shadow_e2e_seconds", side) for side in ("live", "shadow")}
        verdicts: tuple[Verdict, ...] = ("agreed", "different", "unpromised")
        self.metrics.gauges(
            "shadow_requests_total",
            lambda: {
                **{(verdict,): float(agreement.verdicts[verdict]) for verdict in verdicts},
                ("dropped",): float(agreement.num_dropped),
            },
        )
        self.metrics.gauges(
            "shadow_tokens_total",
            lambda: {
                ("agreed",): float(agreement.num_tokens_agreed),
                ("different",): float(agreement.num_tokens - agreement.num_tokens_agreed),
            },
        )
        self.metrics.gauges(
            "shadow_differences_total", lambda: {(what,): float(n) for what, n in agreement.whats.items()}
        )

    def watch(self, shadow: Shadow) -> None:
        """Show how many requests run."""
        self.metrics.gauge("shadow_requests_open", lambda: float(shadow.num_open))

    def compared(self, verdict: Verdict | None, live: Outcome, other: Outcome) -> None:
        """Note how long both took."""
        for side, outcome in (("live", live), ("shadow", other)):
            if verdict is not None and outcome.ended_s is not None and outcome.asked_s is not None:
                self._seconds[side].observe(outcome.ended_s - outcome.asked_s)
