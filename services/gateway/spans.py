"""The gateway's part of a request's trace: one server span by OpenTelemetry's GenAI conventions, and no content."""

import contextlib
from collections.abc import Iterable, Iterator

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span

from schemas.generation import GenerateRequest
from schemas.output import Usage
from services.runtime.telemetry import Tracing

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""The paths that are traced. Health checks and the like would only fill the collector."""


@contextlib.contextmanager
def exchange_span(tracing: Tracing, method: str, path: str, traceparent: str | None) -> Iterator[None]:
    """Run the block in a server span if `path` is one that is traced; a client's `traceparent` becomes its parent."""
    operation = OPERATIONS.get(path)
    if operation is None:
        yield
        return
    attributes = {
        "http.request.method": method,
        "http.route": path,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "natterjack",
    }
    with tracing.span(f"{method} {path}", kind=SpanKind.SERVER, parent=traceparent, attributes=attributes):
        yield


def describe_request(answer_id: str, requests: tuple[GenerateRequest, ...]) -> None:
    """Note on the current span what is asked."""
    span, request = get_current_span(), requests[0]
    span.set_attribute("gen_ai.response.id", answer_id)
    _set(span, "gen_ai.request.model", request.model)
    _set(span, "gen_ai.request.max_tokens", request.max_tokens)
    _set(span, "gen_ai.request.temperature", request.temperature)
    _set(span, "gen_ai.request.top_p", request.top_p)
    _set(span, "gen_ai.request.top_k", request.top_k)
    _set(span, "gen_ai.request.seed", request.seed)
    span.set_attribute("gen_ai.request.choice.count", request.n * len(requests))


def describe_usage(usages: Iterable[Usage]) -> None:
    """Note on the current span how many tokens all prompts and choices took."""
    span, counted = get_current_span(), tuple(usages)
    span.set_attribute("gen_ai.usage.input_tokens", sum(usage.prompt_tokens for usage in counted))
    span.set_attribute("gen_ai.usage.output_tokens", sum(usage.completion_tokens for usage in counted))
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", sum(usage.cached_tokens for usage in counted))


def describe_outcome(status: int) -> None:
    """Note on the current span how the exchange ended."""
    span = get_current_span()
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))


def _set(span: Span, name: str, value: str | float | None) -> None:
    if value is not None:
        span.set_attribute(name, value)
