"""A trace in the terminal: its facts, its decisions, and its spans as bars over time. Pure."""

import time

from rich.console import Group
from rich.table import Table
from rich.text import Text

from schemas.telemetry import TraceDecision, TraceReply, WaterfallRow

BLOCKS = " ▏▎▍▌▋▊▉█"
STYLES = {
    "gateway": "blue",
    "tokenizer": "cyan",
    "scheduler": "yellow",
    "cache_manager": "magenta",
    "executor": "green",
}
DECISION_STYLES = {"preempted": "yellow", "moved": "yellow", "taken_over": "yellow", "failed": "bold red"}
MIN_BAR_WIDTH = 12
OTHER_COLUMNS = 13
"""What durations and the spaces between columns take."""


def trace_view(reply: TraceReply, width: int) -> Group:
    """Return what is printed on a terminal that is `width` columns wide."""
    name_width = max(2 * row.depth + len(row.name) for row in reply.rows)
    instance_width = max(len(row.instance) for row in reply.rows)
    bar_width = max(MIN_BAR_WIDTH, width - name_width - instance_width - OTHER_COLUMNS)
    return Group(_facts(reply), Text(), _decisions(reply.decisions), Text(), _waterfall(reply, bar_width))


def _facts(reply: TraceReply) -> Text:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reply.started_s))
    text = Text(f"{', '.join(reply.request_ids) or reply.request}\n", style="bold")
    text.append(f"began {began}, took {span_time(reply.duration_s)}, trace {reply.trace_id}", style="dim")
    if reply.error:
        text.append(f"\nfailed: {reply.error}", style="bold red")
    if reply.num_missing:
        text.append(f"\n{reply.num_missing} more spans were not kept", style="yellow")
    return text


def _decisions(decisions: tuple[TraceDecision, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column()
    for decision in decisions:
        text = Text(decision.text, style=DECISION_STYLES.get(decision.kind, ""))
        table.add_row(Text(f"+{span_time(decision.offset_s)}"), text)
    return table


def _waterfall(reply: TraceReply, bar_width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for row in reply.rows:
        name = Text("  " * row.depth + row.name, style="red" if row.error else "")
        bar = Text(span_bar(row, reply.duration_s, bar_width), style=STYLES.get(row.role, ""))
        table.add_row(name, Text(row.instance, style="dim"), bar, Text(span_time(row.duration_s)))
    return table


def span_bar(row: WaterfallRow, total_s: float, width: int) -> str:
    """Return a span as blocks on a line of `width` characters, its end exact to an eighth of one; never empty."""
    scale = width / total_s if total_s > 0 else 0.0
    start = min(width - 1, max(0, int(row.offset_s * scale)))
    eighths = max(1, round((row.offset_s + row.duration_s) * scale * 8) - start * 8)
    whole, rest = divmod(min(eighths, (width - start) * 8), 8)
    return (" " * start + BLOCKS[8] * whole + (BLOCKS[rest] if rest else "")).ljust(width)


def span_time(seconds: float) -> str:
    """Return a time for people: µs, ms or s."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.001 else f"{seconds * 1e6:.0f} µs"
