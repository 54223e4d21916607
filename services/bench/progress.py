"""Shows on stderr how far a load is: a live bar on a terminal, a line every few seconds elsewhere."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from services.bench.load import Progress

DRAW_PERIOD_S = 0.25
LINE_PERIOD_S = 5.0


@contextlib.asynccontextmanager
async def shown(progress: Progress, title: str, console: Console | None = None) -> AsyncIterator[None]:
    """Show `progress` until the block ends; what it showed on a terminal is taken away again."""
    console = console or Console(file=sys.stderr)
    show = _draw if console.is_terminal else _print_lines
    task = asyncio.create_task(show(progress, title, console))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _draw(progress: Progress, title: str, console: Console) -> None:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
    with Bar(*columns, console=console, transient=True, auto_refresh=False) as bar:
        drawn = bar.add_task(title, words="")
        while True:
            bar.update(drawn, total=progress.num_requests, completed=progress.num_ended, words=_words(progress))
            bar.refresh()
            await asyncio.sleep(DRAW_PERIOD_S)


async def _print_lines(progress: Progress, title: str, console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_PERIOD_S)
        console.print(f"{title}: {progress.num_ended}/{progress.num_requests}, {_words(progress)}", soft_wrap=True)


def _words(progress: Progress) -> str:
    running = progress.num_started - progress.num_ended
    rate = progress.num_output_tokens / max(perf_counter() - progress.began_s, 1e-9)
    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    return f"{running} under way{failed}, {rate:.0f} tokens/s"
