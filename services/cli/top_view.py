"""The deployment in the terminal: services, traffic, latencies, executors. Pure."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from services.cli.trace_view import BLOCKS, span_time
from services.console.overview import Overview, Point

HEALTH = {"ok": ("●", "green"), "busy": ("◐", "yellow"), "bad": ("✕", "bold red")}
NOTHING = "–"
METER_WIDTH = 24


def top_view(overview: Overview) -> Group:
    """Return one picture."""
    return Group(
        _head(overview),
        Text(),
        _instances(overview),
        Text(),
        _traffic(overview.point),
        Text(),
        _executors(overview),
    )


def _head(overview: Overview) -> Text:
    symbol, style = HEALTH[overview.health]
    text = Text(f"{symbol} {overview.state}", style=style)
    text.append(f"   {', '.join(overview.models)}   version {overview.version or NOTHING}", style="dim")
    return text


def _instances(overview: Overview) -> Table:
    table = _table("INSTANCE", "STATE", ">CPU", ">MEMORY")
    for role in overview.roles:
        if not role.instances and role.health == "bad":
            table.add_row(Text(role.role), Text(f"✕ {role.state}", style="bold red"), NOTHING, NOTHING)
        for instance in role.instances:
            symbol, style = HEALTH[instance.health]
            state = Text(f"{symbol} {instance.state}", style=style)
            memory = f"{instance.memory_bytes / 1e6:.0f} MB" if instance.memory_bytes else NOTHING
            table.add_row(Text(instance.name), state, f"{instance.cpu:.0%}", memory)
    return table


def _traffic(point: Point) -> Table:
    table = _table("", ">p50", ">p95", ">p99", "", "", ">")
    rows = [
        ("first token", point.ttft_s, "requests/s", _rate(point.requests_per_s)),
        ("between tokens", point.itl_s, "errors/s", _rate(point.errors_per_s)),
        ("", (), "output tokens/s", _rate(point.output_tokens_per_s)),
        ("", (), "prompt tokens/s", _rate(point.prompt_tokens_per_s)),
        ("", (), "running, waiting", f"{point.running}, {point.waiting}"),
    ]
    for name, times, label, figure in rows:
        cells = [span_time(value) if value is not None else NOTHING for value in times] or [""] * 3
        table.add_row(name, *cells, "   ", label, figure)
    return table


def _executors(overview: Overview) -> Table:
    table = _table("EXECUTOR", "KV BLOCKS", ">USED", ">SEQUENCES", ">BUSY", "ENGINE")
    for executor in overview.executors:
        meter = Text(_meter(executor.kv_usage), style="red" if executor.kv_usage > 0.9 else "blue")
        used = f"{executor.blocks_used} of {executor.blocks_total}"
        table.add_row(
            Text(executor.name), meter, used, str(executor.sequences), f"{executor.busy:.0%}", Text(executor.engine)
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def _meter(share: float) -> str:
    whole, rest = divmod(round(min(1.0, max(0.0, share)) * METER_WIDTH * 8), 8)
    return (BLOCKS[8] * whole + (BLOCKS[rest] if rest else "")).ljust(METER_WIDTH, "·")


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.2f}"
