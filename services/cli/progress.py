"""Shows on stderr what a starting deployment is doing: a live table on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.supervisor.events import StageEvent

STYLE_BY_HAPPENING = {
    "starting": "yellow",
    "ready": "green",
    "restarting": "red",
    "stopping": "dim",
    "stopped": "dim",
    "failed": "bold red",
}
TROUBLE = frozenset({"restarting", "failed"})


class StageDisplay:
    """Takes the supervisor's events; a context manager around the time that they are shown.

    A transient display leaves nothing on a terminal, and elsewhere speaks only of trouble.
    """

    def __init__(self, *, is_transient: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._latest: dict[str, StageEvent] = {}
        self._live: Live | None = None
        self._is_transient = is_transient
        self._said: dict[str, tuple[str, str]] = {}

    def __enter__(self) -> "StageDisplay":
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=self._is_transient)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def settle(self) -> None:
        """Stop drawing; later events are plain lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_event(self, event: StageEvent) -> None:
        """Show an event."""
        self._latest[event.name] = event
        if self._live is not None:
            self._live.update(self._table())
            return
        said = (event.happening, event.stage)
        is_news = self._said.get(event.name) != said and (not self._is_transient or event.happening in TROUBLE)
        if is_news:
            self._said[event.name] = said
            words = [event.happening, event.stage, event.detail]
            self._console.print(Text(f"{event.name}: " + ", ".join(word for word in words if word)), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for event in self._latest.values():
            style = STYLE_BY_HAPPENING[event.happening]
            bar: ProgressBar | Text = Text("")
            if event.happening == "starting" and event.progress is not None:
                bar = ProgressBar(total=1.0, completed=event.progress, width=24)
            table.add_row(
                Text(event.name),
                Text(event.stage or event.happening, style=style),
                bar,
                Text(event.detail, style="dim"),
            )
        return table
