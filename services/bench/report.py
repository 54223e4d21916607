"""The figures of a benchmark: one JSON object with the keys of `vllm bench serve`, ours below `natterjack`. Pure.

A latency is that of the successful requests. An inter-token latency lies between two pieces of an answer as they came;
one piece may hold several tokens.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from services.bench.goodput import Objective, count_good
from services.bench.load import Outcome
from services.bench.record import RequestRecord
from services.bench.statistics import latency_figures
from services.bench.step_times import ExecutorFigures

LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Setting:
    """How the load was made: it goes into the report as it is."""

    backend: str
    model: str
    num_prompts: int
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int = 0
    label: str = ""
    date: str = ""
    dataset: str = "words"
    num_warmups: int = 0
    seed: int = 0
    objectives: tuple[Objective, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """What a watch over the deployment saw; empty where there was none."""

    cpu_s: dict[str, float] = field(default_factory=dict)
    executors: dict[str, ExecutorFigures] = field(default_factory=dict)


def report(setting: Setting, outcome: Outcome, observed: Observed, *, is_detailed: bool = False) -> dict[str, Any]:
    """Return everything; `is_detailed` adds the lists with an entry for each request."""
    return {
        **_head(setting),
        **_totals(setting, outcome),
        **_latencies(setting, [record for record in outcome.records if record.is_success]),
        **(_details(outcome) if is_detailed else {}),
        "natterjack": _ours(setting, outcome, observed),
    }


def _head(setting: Setting) -> dict[str, Any]:
    return {
        "date": setting.date,
        "endpoint_type": setting.backend,
        "backend": setting.backend,
        "label": setting.label or None,
        "model_id": setting.model,
        "tokenizer_id": setting.model,
        "num_prompts": setting.num_prompts,
        "request_rate": "inf" if math.isinf(setting.request_rate) else setting.request_rate,
        "burstiness": "inf" if math.isinf(setting.burstiness) else setting.burstiness,
        "max_concurrency": setting.max_concurrency or None,
    }


def _totals(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    done = [record for record in outcome.records if record.is_success]
    num_input = sum(record.num_prompt_tokens for record in done)
    num_output = sum(record.num_output_tokens for record in done)
    duration_s = outcome.duration_s
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcome.records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": count_good(done, setting.objectives) / duration_s if setting.objectives else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens_per_s(done),
        "max_concurrent_requests": peak_concurrency(done),
    }


def _latencies(setting: Setting, done: Sequence[RequestRecord]) -> dict[str, float]:
    values_s = {
        "ttft": [record.ttft_s for record in done],
        "tpot": [tpot_s for record in done if (tpot_s := record.tpot_s) is not None],
        "itl": [itl_s for record in done for itl_s in record.itls_s],
        "e2el": [record.latency_s for record in done],
    }
    if setting.max_concurrency:
        values_s["client_queue_time"] = [record.queue_s for record in done]
        if not math.isinf(setting.request_rate):
            values_s["e2el_including_client_queue"] = [record.latency_s + record.queue_s for record in done]
    return {key: value for name, values in values_s.items() for key, value in latency_figures(name, values).items()}


def _details(outcome: Outcome) -> dict[str, list[Any]]:
    """One entry for each request, in the order in which they were to be sent; times in seconds."""
    records = outcome.records
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens if record.is_success else 0 for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "latencies": [record.latency_s for record in records],
        "start_times": [record.started_s for record in records],
        "queue_times": [record.queue_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def _ours(setting: Setting, outcome: Outcome, observed: Observed) -> dict[str, Any]:
    return {
        "dataset": setting.dataset,
        "seed": setting.seed,
        "num_warmups": setting.num_warmups,
        "goodput": {objective.name: objective.limit_ms for objective in setting.objectives},
        "failures": dict(Counter(record.error or "no end" for record in outcome.records if not record.is_success)),
        "total_cached_tokens": sum(record.num_cached_tokens for record in outcome.records if record.is_success),
        "client_cpu_s": outcome.client_cpu_s,
        "service_cpu_s": observed.cpu_s,
        "executors": {name: asdict(figures) for name, figures in observed.executors.items()},
    }


def peak_tokens_per_s(done: Sequence[RequestRecord]) -> float:
    """Return the most tokens in any one second after the first start; a request's tokens spread over its pieces."""
    if not done:
        return 0.0
    began_s = min(record.started_s for record in done)
    counts: defaultdict[int, float] = defaultdict(float)
    for record in done:
        per_piece = record.num_output_tokens / len(record.pieces_s) if record.pieces_s else 0.0
        for piece_s in record.pieces_s:
            counts[int(piece_s - began_s)] += per_piece
    return max(counts.values(), default=0.0)


def peak_concurrency(done: Sequence[RequestRecord]) -> int:
    """Return the most requests under way at one moment; one that ends just as another begins does not count."""
    changes = [(record.started_s, 1) for record in done]
    changes += [(record.started_s + record.latency_s, -1) for record in done]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak
