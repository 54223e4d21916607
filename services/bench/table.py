"""The report as a person reads it."""

from collections.abc import Iterator
from typing import Any

from services.bench.report import LATENCIES

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between pieces",
    "e2el": "whole request",
    "client_queue_time": "waited in the client",
}
COLUMNS = ("mean", "median", "std", "p90", "p95", "p99")


def table(report: dict[str, Any]) -> str:
    """Return the lines of a report made by `services.bench.report`."""
    return "\n".join([*_totals(report), "", *_latencies(report), *_failures(report), *_deployment(report)])


def _totals(report: dict[str, Any]) -> Iterator[str]:
    limit = f", at most {report['max_concurrency']} at once" if report["max_concurrency"] else ""
    rate = f"{report['num_prompts']} prompts at {report['request_rate']}/s{limit}"
    yield f"{report['model_id']} over {report['backend']}: {rate}"
    yield ""
    yield f"{'requests':24}{report['completed']} completed, {report['failed']} failed in {report['duration']:.2f} s"
    cached = report["natterjack"]["total_cached_tokens"]
    yield f"{'tokens':24}{report['total_input_tokens']} in ({cached} cached), {report['total_output_tokens']} out"
    yield f"{'request throughput':24}{report['request_throughput']:.2f}/s"
    if report["request_goodput"] is not None:
        goals = " ".join(f"{name}:{limit_ms:g}" for name, limit_ms in report["natterjack"]["goodput"].items())
        yield f"{'request goodput':24}{report['request_goodput']:.2f}/s ({goals})"
    best = f"best second {report['max_output_tokens_per_s']:.0f}"
    yield f"{'output tokens':24}{report['output_throughput']:.1f}/s ({best})"
    yield f"{'all tokens':24}{report['total_token_throughput']:.1f}/s"
    yield f"{'most at once':24}{report['max_concurrent_requests']}"


def _latencies(report: dict[str, Any]) -> Iterator[str]:
    yield f"{'milliseconds':24}" + "".join(f"{column:>11}" for column in COLUMNS)
    for name in (*LATENCIES, "client_queue_time"):
        if f"mean_{name}_ms" in report:
            values = "".join(f"{report[f'{column}_{name}_ms']:11.2f}" for column in COLUMNS)
            yield f"{TITLES[name]:24}{values}"


def _failures(report: dict[str, Any]) -> Iterator[str]:
    failures = report["natterjack"]["failures"]
    if failures:
        yield from ("", "failures")
        for reason, count in sorted(failures.items(), key=lambda failure: -failure[1]):
            yield f"{count:8}  {reason}"


def _deployment(report: dict[str, Any]) -> Iterator[str]:
    ours, duration_s = report["natterjack"], report["duration"]
    yield ""
    yield f"{'processor time':24}{'seconds':>11}{'cores':>11}"
    for name, cpu_s in {**ours["service_cpu_s"], "this client": ours["client_cpu_s"]}.items():
        yield f"{name:24}{cpu_s:11.2f}{cpu_s / duration_s:11.3f}"
    for name, figures in ours["executors"].items():
        yield ""
        yield (
            f"{name}: {figures['num_steps']} steps of {figures['median_step_ms']:.2f} ms (median); while answers were "
            f"under way, {figures['engine_share']:.1%} in the engine and {figures['idle_share']:.1%} waiting for a plan"
        )
