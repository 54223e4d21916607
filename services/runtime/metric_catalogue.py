"""Every metric that Natterjack has, by name: the only place where they are defined. Knows no service.

Names behind the prefix `natterjack_` and their meanings are vLLM's where vLLM has the metric, so that its dashboards
work after search and replace. Each request is counted once per deployment, by whoever faces its client: the gateway for
HTTP, the tokenizer for a NATS client that asked for replies. What engines did is counted by scheduler and executor.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
LATENCY_S = (*SECONDS, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Small models produce a token every few milliseconds, long answers take minutes."""
HOP_S = (0.0001, 0.0002, 0.0005, *SECONDS, 1.0, 2.0, 5.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)

FINISHED_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `known` are values of its only label that are shown as 0 before they occur, so that rates work."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    known: tuple[str, ...] = ()


def _seconds(text: str, *labels: str) -> Metric:
    return Metric("histogram", text, labels, LATENCY_S)


METRICS: dict[str, Metric] = {
    # requests, measured where the client is faced
    "time_to_first_token_seconds": _seconds("From the request's arrival to its first token."),
    "inter_token_latency_seconds": _seconds("Between two tokens of a request; tokens that come together share it."),
    "request_time_per_output_token_seconds": _seconds("Mean time between a request's tokens after the first."),
    "e2e_request_latency_seconds": _seconds("From the request's arrival to its end."),
    "request_prompt_tokens": Metric("histogram", "Prompt tokens of a request.", (), TOKENS),
    "request_generation_tokens": Metric("histogram", "Generated tokens of a request, all choices.", (), TOKENS),
    "prompt_tokens_total": Metric("counter", "Prompt tokens of the accepted requests."),
    "generation_tokens_total": Metric("counter", "Tokens that clients were given."),
    "request_success_total": Metric(
        "counter", "Requests that ended, by how.", ("finished_reason",), known=FINISHED_REASONS
    ),
    "request_errors_total": Metric("counter", "Requests that ended with an error, refused ones included.", ("code",)),
    "num_requests_open": Metric("gauge", "Requests whose client waits for an answer."),
    "http_requests_total": Metric("counter", "HTTP exchanges by route and status.", ("route", "status")),
    # the front door and the output log
    "requests_accepted_total": Metric("counter", "Requests that were stored in the work queue."),
    "admission_rejections_total": Metric("counter", "Requests that were refused, by reason.", ("reason",)),
    "request_encode_seconds": _seconds("Templating and encoding a prompt."),
    "detokenize_seconds": Metric("histogram", "One batch of tokens becoming text.", (), HOP_S),
    "num_outputs_open": Metric("gauge", "Outputs that a tokenizer is writing."),
    "output_append_seconds": Metric("histogram", "Storing one chunk in the output log.", (), HOP_S),
    "output_appended_tokens_total": Metric("counter", "Tokens that were stored in output logs."),
    "output_append_failures_total": Metric("counter", "Outputs that could not be written.", ("reason",)),
    # the scheduler
    "num_requests_running": Metric("gauge", "Requests that run on an executor."),
    "num_requests_waiting": Metric("gauge", "Requests that wait for an executor."),
    "num_executors": Metric("gauge", "Executors that this scheduler drives."),
    "num_steps_in_flight": Metric("gauge", "Plans that were sent and not answered.", ("executor",)),
    "oldest_request_age_seconds": Metric("gauge", "Time since the oldest held request made progress."),
    "num_preemptions_total": Metric("counter", "Running sequences that lost their blocks to others."),
    "request_queue_time_seconds": _seconds("From acceptance until a request first runs."),
    "request_prefill_time_seconds": _seconds("From when a request first runs to its first token."),
    "request_decode_time_seconds": _seconds("From a request's first token to its last."),
    "iteration_tokens_total": Metric("histogram", "Tokens of a step, over all its sequences.", (), TOKENS),
    "tokens_wasted_after_cancel_total": Metric("counter", "Planned tokens whose sequence had ended meanwhile."),
    "time_to_abort_seconds": _seconds("From a cancellation to the stored end of its request."),
    "lease_epoch": Metric("gauge", "Fencing epoch in which an executor is driven.", ("executor",)),
    "executor_restarts_total": Metric("counter", "Epochs that were lost and began anew."),
    "redeliveries_total": Metric("counter", "Requests that the work queue handed out again."),
    "dead_letters_total": Metric("counter", "Work items that were given up."),
    # KV blocks
    "kv_cache_usage_perc": Metric("gauge", "Part of the KV blocks that is leased, 0 to 1.", ("executor",)),
    "prefix_cache_queries_total": Metric("counter", "Tokens that were looked up in the prefix cache."),
    "prefix_cache_hits_total": Metric("counter", "Tokens that were found in the prefix cache."),
    "prefix_cache_host_hits_total": Metric("counter", "Tokens of these that are loaded from host memory."),
    "kv_cache_host_usage_perc": Metric("gauge", "Part of the host's KV blocks that is in use, 0 to 1.", ("executor",)),
    "cache_config_info": Metric("gauge", "Shape of an executor's KV pool.", ("executor", "block_size", "num_blocks")),
    # the executor
    "step_seconds": Metric(
        "histogram", "The engine's part of a step.", ("phase",), LATENCY_S, ("prefill", "decode", "mixed")
    ),
    "executor_idle_seconds_total": Metric("counter", "Time that the engine waited for a plan."),
    "executor_busy_seconds_total": Metric("counter", "Time that the engine computed."),
    "num_sequences_held": Metric("gauge", "Sequences that are on this executor."),
    "steps_refused_total": Metric("counter", "Plans that could not be run because one before was missing."),
    # the bus, as the gateway sees it
    "stream_messages": Metric("gauge", "Messages in a stream.", ("stream",)),
    "stream_bytes": Metric("gauge", "Bytes in a stream.", ("stream",)),
    "stream_full_perc": Metric("gauge", "The nearer of a stream's limits that is used, 0 to 1.", ("stream",)),
    # a shadow: a second pipeline beside the live one
    "shadow_requests_total": Metric(
        "counter", "Mirrored requests, by how both pipelines' answers compare.", ("verdict",)
    ),
    "shadow_tokens_total": Metric(
        "counter", "Tokens of the compared requests, up to a difference and after.", ("verdict",)
    ),
    "shadow_differences_total": Metric("counter", "What differed between the two answers.", ("what",)),
    "shadow_requests_open": Metric("gauge", "Mirrored requests that run."),
    "shadow_e2e_seconds": _seconds("From a mirrored request's acceptance to its end.", "pipeline"),
    # every service
    "bus_hop_seconds": Metric("histogram", "From sending a message to its arrival here.", ("subject",), HOP_S),
    "bus_request_seconds": Metric("histogram", "A request over the bus and its answer.", ("subject",), HOP_S),
    "bus_connected": Metric("gauge", "1 while the bus is connected."),
    "bus_reconnects_total": Metric("counter", "Reconnections to the bus."),
    "build_info": Metric("gauge", "Role and version of this instance.", ("role", "version", "name")),
}
