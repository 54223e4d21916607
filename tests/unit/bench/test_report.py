"""The report has the keys that scripts for `vllm bench serve` read, computed from the successful requests only."""

import math

import pytest

from services.bench.goodput import parse_objectives
from services.bench.load import Outcome
from services.bench.record import RequestRecord
from services.bench.report import Observed, Setting, peak_concurrency, peak_tokens_per_s, report
from services.bench.step_times import StepTime, executor_figures
from services.bench.table import table

VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{f}_{n}_ms" for f in ("mean", "median", "std", "p90", "p95", "p99") for n in ("ttft", "tpot", "itl", "e2el")),
}
VLLM_DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts"),
    "errors",
}

FAST = RequestRecord(0.0, 1.0, 3.0, [1.5, 2.0, 3.0], 10, 4, 5)
SLOW = RequestRecord(0.0, 2.0, 6.0, [4.0, 6.0], 20, 0, 3)
BROKEN = RequestRecord(0.0, 2.0, 2.5, [2.2], 20, 0, 1, "queue_full")


def setting(**changes):
    return Setting(backend="openai", model="smol", num_prompts=3, **changes)


def figures(records=(FAST, SLOW, BROKEN), **changes):
    return report(setting(**changes), Outcome(list(records), 5.0, 0.5), Observed())


def test_all_keys_of_vllm_are_there():
    assert figures().keys() >= VLLM_KEYS
    detailed = report(setting(), Outcome([FAST], 5.0, 0.5), Observed(), is_detailed=True)
    assert detailed.keys() >= VLLM_KEYS | VLLM_DETAILS


def test_totals_and_throughputs_count_successful_requests_only():
    got = figures()
    assert (got["completed"], got["failed"], got["total_input_tokens"], got["total_output_tokens"]) == (2, 1, 30, 8)
    assert (got["request_throughput"], got["output_throughput"], got["total_token_throughput"]) == (0.4, 1.6, 7.6)
    assert got["natterjack"]["failures"] == {"queue_full": 1}
    assert got["natterjack"]["total_cached_tokens"] == 4


def test_latencies_are_those_of_a_hand_computed_example():
    got = figures()
    assert got["mean_ttft_ms"] == pytest.approx((500 + 2000) / 2)
    assert got["mean_tpot_ms"] == pytest.approx((1500 / 4 + 2000 / 2) / 2)
    assert got["mean_itl_ms"] == pytest.approx((500 + 1000 + 2000) / 3)
    assert got["mean_e2el_ms"] == pytest.approx((2000 + 4000) / 2)


def test_goodput_is_a_rate_and_null_without_objectives():
    assert figures()["request_goodput"] is None
    assert figures(objectives=parse_objectives(["ttft:600"]))["request_goodput"] == pytest.approx(0.2)


def test_infinite_rates_are_written_as_text_for_json_has_no_infinity():
    assert (figures()["request_rate"], figures(request_rate=2.5)["request_rate"]) == ("inf", 2.5)
    assert figures(burstiness=math.inf)["burstiness"] == "inf"


def test_waiting_in_the_client_is_told_where_concurrency_is_limited():
    assert "mean_client_queue_time_ms" not in figures()
    assert figures(max_concurrency=2)["mean_client_queue_time_ms"] == pytest.approx(1500)
    assert "mean_e2el_including_client_queue_ms" in figures(max_concurrency=2, request_rate=1.0)


def test_a_run_without_any_success_has_figures_and_a_table():
    got = figures(records=[BROKEN])
    assert (got["completed"], got["mean_ttft_ms"], got["max_output_tokens_per_s"]) == (0, 0.0, 0.0)
    assert "queue_full" in table(got)


def test_peaks_count_tokens_by_second_and_no_request_twice():
    assert peak_tokens_per_s([FAST, SLOW]) == pytest.approx(5 / 3 * 1)
    back_to_back = [RequestRecord(0.0, 0.0, 1.0, [1.0]), RequestRecord(0.0, 1.0, 2.0, [2.0])]
    assert (peak_concurrency(back_to_back), peak_concurrency([FAST, SLOW])) == (1, 2)


def test_the_table_names_processes_and_executors():
    steps = executor_figures([StepTime(1.0, 0.9, 0.1)], [(0.0, 1.0)])
    observed = Observed({"gateway-0": 1.0}, {"executor-0": steps})
    text = table(report(setting(), Outcome([FAST], 5.0, 0.5), observed))
    assert "gateway-0" in text
    assert "90.0% in the engine and 10.0% waiting" in text
