"""Writes the dashboards: `python configs/grafana/make_dashboards.py`. Boards are rows of panels, of expressions.

Change a board here, run this, and commit both; a test compares them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 24, 8

Queries = dict[str, str]
"""Expression by legend."""


@dataclass(frozen=True)
class Panel:
    """One panel: a chart over time, or with `kind="stat"` a number."""

    title: str
    queries: Queries
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""
    is_stacked: bool = False


@dataclass(frozen=True)
class Board:
    """One dashboard: rows by title."""

    uid: str
    title: str
    rows: dict[str, list[Panel]]


def quantiles(metric: str, by: str = "", **labels: str) -> Queries:
    """Return p50, p90 and p99 of a histogram."""
    chosen = ",".join(f'{key}="{value}"' for key, value in labels.items())
    grouping = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{part}{legend}": f"histogram_quantile(0.{part}, "
        f"sum by ({grouping}) (rate(natterjack_{metric}_bucket{{{chosen}}}[$__rate_interval])))"
        for part in (50, 90, 99)
    }


def rate(metric: str, by: str = "") -> str:
    """Return a counter's rate, summed over the deployment or by a label."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate(natterjack_{metric}[$__rate_interval]))"


OVERVIEW = Board(
    "natterjack-overview",
    "Natterjack · Overview",
    {
        "Now": [
            Panel("Requests per second", {"requests": rate("request_success_total")}, "reqps", "stat"),
            Panel("Tokens per second", {"tokens": rate("generation_tokens_total")}, "short", "stat"),
            Panel("Running", {"running": "sum(natterjack_num_requests_running)"}, "short", "stat"),
            Panel("Waiting", {"waiting": "sum(natterjack_num_requests_waiting)"}, "short", "stat"),
            Panel("Executors", {"executors": "max(natterjack_num_executors)"}, "short", "stat"),
            Panel("Firing alerts", {"alerts": 'count(ALERTS{alertstate="firing"}) or vector(0)'}, "short", "stat"),
        ],
        "Traffic": [
            Panel(
                "Requests by end", {"{{finished_reason}}": rate("request_success_total", "finished_reason")}, "reqps"
            ),
            Panel(
                "Tokens",
                {"generated": rate("generation_tokens_total"), "prompt": rate("prompt_tokens_total")},
            ),
            Panel("HTTP by status", {"{{status}}": rate("http_requests_total", "status")}, "reqps"),
        ],
        "Latency": [
            Panel("Time to first token", quantiles("time_to_first_token_seconds"), "s"),
            Panel("Time between tokens", quantiles("inter_token_latency_seconds"), "s"),
            Panel("Whole request", quantiles("e2e_request_latency_seconds"), "s"),
            Panel(
                "Where the first token's time goes (p50)",
                {
                    "encode": quantiles("request_encode_seconds")["p50"],
                    "queue": quantiles("request_queue_time_seconds")["p50"],
                    "prefill": quantiles("request_prefill_time_seconds")["p50"],
                    "append": quantiles("output_append_seconds")["p50"],
                },
                "s",
                is_stacked=True,
            ),
        ],
        "Errors": [
            Panel("Errors by code", {"{{code}}": f"{rate('request_errors_total', 'code')} or vector(0)"}, "reqps"),
            Panel(
                "Refused by reason",
                {"{{reason}}": f"{rate('admission_rejections_total', 'reason')} or vector(0)"},
                "reqps",
            ),
            Panel("Open requests", {"{{service}}": "sum by (service) (natterjack_num_requests_open)"}),
        ],
    },
)

SCHEDULER = Board(
    "natterjack-scheduler",
    "Natterjack · Scheduler and cache",
    {
        "Queue": [
            Panel(
                "Requests",
                {
                    "running": "sum(natterjack_num_requests_running)",
                    "waiting": "sum(natterjack_num_requests_waiting)",
                },
                is_stacked=True,
            ),
            Panel("Time in the queue", quantiles("request_queue_time_seconds"), "s"),
            Panel("Longest without progress", {"age": "max(natterjack_oldest_request_age_seconds)"}, "s"),
        ],
        "Batches": [
            Panel("Tokens per step", quantiles("iteration_tokens_total")),
            Panel("Steps in flight", {"{{executor}}": "natterjack_num_steps_in_flight"}),
            Panel("Preemptions", {"preemptions": rate("num_preemptions_total")}, "ops"),
            Panel("Tokens computed for nobody", {"wasted": rate("tokens_wasted_after_cancel_total")}),
        ],
        "KV blocks": [
            Panel("Blocks leased", {"{{executor}}": "natterjack_kv_cache_usage_perc"}, "percentunit"),
            Panel(
                "Prefix cache hits",
                {
                    "hits": "sum(rate(natterjack_prefix_cache_hits_total[$__rate_interval])) / "
                    "(sum(rate(natterjack_prefix_cache_queries_total[$__rate_interval])) > 0)"
                },
                "percentunit",
            ),
            Panel("Host blocks in use", {"{{executor}}": "natterjack_kv_cache_host_usage_perc"}, "percentunit"),
            Panel("Tokens loaded from host memory", {"loaded": rate("prefix_cache_host_hits_total")}),
        ],
        "Ends": [
            Panel("From cancellation to the end", quantiles("time_to_abort_seconds"), "s"),
            Panel("Prefill", quantiles("request_prefill_time_seconds"), "s"),
            Panel("Decode", quantiles("request_decode_time_seconds"), "s"),
        ],
    },
)

EXECUTORS = Board(
    "natterjack-executors",
    "Natterjack · Executors",
    {
        "Steps": [
            Panel("Steps per second", {"{{phase}}": rate("step_seconds_count", "phase")}, "ops"),
            Panel("Decode step", quantiles("step_seconds", "instance", phase="decode"), "s"),
            Panel("Prefill and mixed steps", quantiles("step_seconds", "phase"), "s"),
        ],
        "Use": [
            Panel("Idle", {"{{instance}}": "executor:natterjack_idle_ratio:rate1m"}, "percentunit"),
            Panel("Sequences", {"{{instance}}": "natterjack_num_sequences_held"}),
            Panel("Lost epochs", {"epochs": rate("executor_restarts_total")}, "ops"),
            Panel("Refused plans", {"plans": rate("steps_refused_total")}, "ops"),
        ],
        "Process": [
            Panel("Memory", {"{{instance}}": 'process_resident_memory_bytes{service="executor"}'}, "bytes"),
            Panel(
                "CPU",
                {"{{instance}}": 'rate(process_cpu_seconds_total{service="executor"}[$__rate_interval])'},
                "cores",
            ),
        ],
    },
)

STREAM_USE = "max by (stream) (natterjack_stream_full_perc)"

BUS = Board(
    "natterjack-bus",
    "Natterjack · Bus and durability",
    {
        "Hops": [
            Panel("From sender to receiver (p50, p90, p99)", quantiles("bus_hop_seconds", "subject"), "s"),
            Panel("Requests over the bus", quantiles("bus_request_seconds", "subject"), "s"),
            Panel("Messages", {"{{subject}}": rate("bus_hop_seconds_count", "subject")}, "ops"),
        ],
        "Output log": [
            Panel("Append", quantiles("output_append_seconds"), "s"),
            Panel("Appends", {"appends": rate("output_append_seconds_count")}, "ops"),
            Panel(
                "Tokens per append",
                {"tokens": f"{rate('output_appended_tokens_total')} / ({rate('output_append_seconds_count')} > 0)"},
            ),
            Panel("Detokenize", quantiles("detokenize_seconds"), "s"),
        ],
        "Durability": [
            Panel("Streams' use of their limits", {"{{stream}}": STREAM_USE}, "percentunit"),
            Panel("Messages in streams", {"{{stream}}": "max by (stream) (natterjack_stream_messages)"}),
            Panel("Redeliveries", {"redeliveries": rate("redeliveries_total")}, "ops"),
            Panel("Dead letters", {"dead letters": "sum(natterjack_dead_letters_total)"}),
            Panel("Writers replaced", {"{{reason}}": rate("output_append_failures_total", "reason")}, "ops"),
            Panel("Reconnections", {"{{service}}": "sum by (service) (natterjack_bus_reconnects_total)"}),
        ],
    },
)

SERVICES = Board(
    "natterjack-services",
    "Natterjack · Services",
    {
        service: [
            Panel("Up", {"instances": f'sum(up{{job="natterjack",service="{service}"}})'}, "short", "stat"),
            Panel(
                "CPU",
                {"{{instance}}": f'rate(process_cpu_seconds_total{{service="{service}"}}[$__rate_interval])'},
                "cores",
            ),
            Panel("Memory", {"{{instance}}": f'process_resident_memory_bytes{{service="{service}"}}'}, "bytes"),
            Panel("Started", {"{{instance}}": f'time() - process_start_time_seconds{{service="{service}"}}'}, "s"),
        ]
        for service in ("gateway", "tokenizer", "scheduler", "cache_manager", "executor")
    },
)

BOARDS = (OVERVIEW, SCHEDULER, EXECUTORS, BUS, SERVICES)


def expressions(board: Board) -> list[str]:
    """Return every expression of a board."""
    return [expression for row in board.rows.values() for panel in row for expression in panel.queries.values()]


def dashboard(board: Board) -> dict[str, Any]:
    """Return a board in Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in board.rows.items():
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "gridPos": _at(0, y, WIDTH, 1)})
        height = HEIGHT // 2 if all(panel.kind == "stat" for panel in row) else HEIGHT
        width = WIDTH // len(row)
        for column, panel in enumerate(row):
            panels.append(_panel(panel, len(panels) + 1) | {"gridPos": _at(column * width, y + 1, width, height)})
        y += height + 1
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["natterjack"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "links": [
            {"type": "dashboards", "title": "Boards", "tags": ["natterjack"], "asDropdown": True, "keepTime": True},
            {"type": "link", "title": "Traces", "url": TRACES, "icon": "external link", "targetBlank": True},
        ],
        "panels": panels,
    }


TRACES = '/explore?left={"datasource":"jaeger","queries":[{"queryType":"search","service":"natterjack-gateway"}]}'


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 15 if panel.is_stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.is_stacked else "none"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "links": [{"title": "Traces of slow requests", "url": TRACES, "targetBlank": True}]
        if panel.unit == "s"
        else [],
        "targets": [
            {"refId": chr(65 + index), "expr": expression, "legendFormat": legend, "datasource": DATASOURCE}
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def rendered(board: Board) -> str:
    """Return a board's file."""
    return json.dumps(dashboard(board), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for board in BOARDS:
        (HERE / f"{board.uid}.json").write_text(rendered(board))
