"""The HTTP application: routes, error mapping, OpenAPI. Knows the pipeline only as a protocol."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from schemas.anthropic import AnthropicError, AnthropicMessage, TokenCount
from schemas.errors import ErrorReply, InvalidRequest, NatterjackError
from schemas.openai import ChatCompletion, Completion, EmbeddingList, Model, ModelList
from schemas.responses import DeletedResponse, InputItems, ResponseObject
from schemas.tokenization import DetokenizeReply, TokenizeReply
from services.gateway.api_keys import ApiKeys
from services.gateway.endpoints import Endpoints
from services.gateway.error_shape import error_response, protocol_error_response
from services.gateway.exchange import REQUEST_ID_HEADER, Exchange
from services.gateway.intake import Intake
from services.gateway.key_check import KeyCheck
from services.gateway.messages.endpoints import MessageEndpoints
from services.gateway.pipeline import Pipeline
from services.gateway.request_schema import add_request_schemas
from services.gateway.responses.endpoints import ResponseEndpoints
from services.gateway.responses.log import ResponseLog
from services.gateway.settings import Settings
from services.runtime.metrics import Metrics
from services.runtime.metrics_page import metrics_page
from services.runtime.telemetry import Tracing

Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    status: {"model": ErrorReply, "description": text}
    for status, text in {
        400: "The request is wrong; `param` names the field.",
        401: "No valid API key.",
        404: "No such model, or no such output.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        503: "Busy or not ready: try again after `Retry-After` seconds.",
        504: "The deadline passed.",
    }.items()
}
STREAMED: dict[str, Any] = {"content": {"text/event-stream": {}}}
"""Beside the JSON of a whole answer, what `stream` asks for."""
METRICS_PAGE: Responses = {
    200: {
        "description": "Prometheus's text format, or OpenMetrics where it is asked for.",
        "content": {"text/plain": {"schema": {"type": "string"}}, "application/openmetrics-text": {}},
    }
}
ANTHROPIC_ERRORS: Responses = {
    **{status: {**error, "model": AnthropicError} for status, error in ERRORS.items()},
    529: {"model": AnthropicError, "description": "The queue is full: try again after `Retry-After` seconds."},
}


def build_app(
    pipeline: Pipeline,
    settings: Settings,
    tracing: Tracing,
    version: str,
    metrics: Metrics | None = None,
    keys: ApiKeys | None = None,
    response_log: ResponseLog | None = None,
) -> FastAPI:
    """Return the application; without a log there is no /v1/responses."""
    metrics = metrics or Metrics(settings.model.name)
    app = FastAPI(
        title="Natterjack",
        version=version,
        description="OpenAI-compatible serving over NATS.",
        redirect_slashes=False,  # a redirect would be built from the Host header that a client sent
    )
    intake = Intake(pipeline, settings)
    _add_routes(app, Endpoints(pipeline, intake, version))
    _add_message_routes(app, MessageEndpoints(pipeline, intake))
    if response_log is not None:
        _add_response_routes(app, ResponseEndpoints(pipeline, response_log, intake))
    app.get("/metrics", response_model=None, responses=METRICS_PAGE)(_metrics_page(metrics))
    app.exception_handler(NatterjackError)(_coded)
    app.exception_handler(HTTPException)(_protocol)
    app.exception_handler(RequestValidationError)(_parameters)
    app.add_middleware(KeyCheck, keys=keys or ApiKeys())
    if settings.gateway.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.gateway.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER],
        )
    app.add_middleware(Exchange, tracing=tracing, metrics=metrics)
    _describe_requests(app)
    return app


def _add_routes(app: FastAPI, endpoints: Endpoints) -> None:
    """`response_model=None`: the endpoint writes its own response."""
    own: dict[str, Any] = {"response_model": None}
    chat: Responses = {200: {"model": ChatCompletion, **STREAMED}, **ERRORS}
    app.post("/v1/chat/completions", responses=chat, **own)(endpoints.chat_completions)
    completion: Responses = {200: {"model": Completion, **STREAMED}, **ERRORS}
    app.post("/v1/completions", responses=completion, **own)(endpoints.completions)
    embeddings: Responses = {200: {"model": EmbeddingList}, **ERRORS}
    app.post("/v1/embeddings", responses=embeddings, **own)(endpoints.embeddings)
    app.post("/tokenize", responses={200: {"model": TokenizeReply}, **ERRORS}, **own)(endpoints.tokenize)
    app.post("/detokenize", responses={200: {"model": DetokenizeReply}, **ERRORS}, **own)(endpoints.detokenize)
    app.get("/v1/models", response_model=ModelList, responses={401: ERRORS[401]})(endpoints.models)
    app.get("/v1/models/{model_id:path}", response_model=Model, responses={401: ERRORS[401], 404: ERRORS[404]})(
        endpoints.model
    )
    app.get("/health", **own)(endpoints.health)
    app.get("/ready", responses={503: ERRORS[503]}, **own)(endpoints.ready)
    app.get("/version", **own)(endpoints.version)


def _add_message_routes(app: FastAPI, endpoints: MessageEndpoints) -> None:
    own: dict[str, Any] = {"response_model": None}
    message: Responses = {200: {"model": AnthropicMessage, **STREAMED}, **ANTHROPIC_ERRORS}
    app.post("/v1/messages", responses=message, **own)(endpoints.create)
    count: Responses = {200: {"model": TokenCount}, **ANTHROPIC_ERRORS}
    app.post("/v1/messages/count_tokens", responses=count, **own)(endpoints.count_tokens)


def _add_response_routes(app: FastAPI, endpoints: ResponseEndpoints) -> None:
    own: dict[str, Any] = {"response_model": None}
    response: Responses = {200: {"model": ResponseObject, **STREAMED}, **ERRORS}
    app.post("/v1/responses", responses=response, **own)(endpoints.create)
    app.get("/v1/responses/{response_id}", responses=response, **own)(endpoints.retrieve)
    app.post("/v1/responses/{response_id}/cancel", responses=response, **own)(endpoints.cancel)
    deleted: Responses = {200: {"model": DeletedResponse}, **ERRORS}
    app.delete("/v1/responses/{response_id}", responses=deleted, **own)(endpoints.delete)
    items: Responses = {200: {"model": InputItems}, **ERRORS}
    app.get("/v1/responses/{response_id}/input_items", responses=items, **own)(endpoints.input_items)


def _metrics_page(metrics: Metrics) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        """Return this gateway's metrics for Prometheus."""
        body, content_type = metrics_page(metrics, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return page


async def _coded(request: Request, error: NatterjackError) -> Response:
    return error_response(error, request.scope)


async def _protocol(request: Request, error: HTTPException) -> Response:
    return protocol_error_response(error, request.scope)


async def _parameters(request: Request, error: Exception) -> Response:
    """Path parameters are texts and bodies are parsed by us, so that FastAPI finds nothing to refuse; never a 422."""
    return error_response(InvalidRequest("The request's parameters are not valid."), request.scope)


def _describe_requests(app: FastAPI) -> None:
    """Bodies are parsed by the endpoints, after the size check: FastAPI has to be told of their schemas."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            app.openapi_schema = add_request_schemas(document)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way of extending the document
