"""The HTTP endpoints: each reads its request, and says who answers it."""

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.errors import Unavailable
from schemas.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, Model, ModelList
from schemas.tokenization import DetokenizeRequest, TokenizeRequest
from services.gateway import spans
from services.gateway.delivery import Delivery, EventStream
from services.gateway.embeddings import embed, translate_embedding
from services.gateway.forms import OpenAiForm
from services.gateway.intake import Intake
from services.gateway.pipeline import Pipeline, generate_all
from services.gateway.resumption import LAST_EVENT_ID, place_of, resumed
from services.gateway.shapes import CHAT, COMPLETION, Shape
from services.gateway.translate import Translation, parse_body, translate_chat, translate_completion

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T", TokenizeRequest, DetokenizeRequest)
Translate = Callable[[B, str, str], Translation]


class Endpoints:
    """The routes' functions, over one pipeline."""

    def __init__(self, pipeline: Pipeline, intake: Intake, version: str) -> None:
        self._pipeline = pipeline
        self._intake = intake
        self._version = version

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        return await self._generate(request, ChatCompletionRequest, translate_chat, CHAT)

    async def completions(self, request: Request) -> Response:
        """Continue one prompt or several, whole or as server-sent events."""
        return await self._generate(request, CompletionRequest, translate_completion, COMPLETION)

    async def _generate(self, request: Request, kind: type[B], translate: Translate[B], shape: Shape) -> Response:
        raw = await self._intake.raw(request)
        place = place_of(request.headers.get(LAST_EVENT_ID))
        default_id = place.id if place is not None else await self._intake.id_of(request, raw)
        translation = translate(parse_body(kind, raw), self._intake.default_model, default_id)
        if place is not None:
            translation = resumed(translation, place)
        translation = self._intake.told_if_new(request, translation)
        self._intake.find(translation.requests[0].model or "")
        spans.describe_request(shape.id_prefix + translation.id, translation.requests)
        source = generate_all(self._pipeline, translation.requests)
        delivery = Delivery(source, OpenAiForm(shape, translation))
        if translation.options.stream:
            return EventStream(delivery, self._intake.keepalive_s)
        return await delivery.whole(request.receive)

    async def embeddings(self, request: Request) -> Response:
        """Return the vectors of one input or several."""
        raw = await self._intake.raw(request)
        body = parse_body(EmbeddingRequest, raw)
        asked = translate_embedding(body, self._intake.default_model, await self._intake.id_of(request, raw))
        self._intake.find(asked.requests[0].model or "")
        asked = self._intake.told_if_new(request, asked)
        spans.describe_request(asked.id, asked.requests)
        return await embed(self._pipeline, asked, request.receive)

    async def tokenize(self, request: Request) -> Response:
        """Return a prompt's or a conversation's tokens, as a generation would begin with them."""
        asked = await self._asked(request, TokenizeRequest)
        reply = await self._pipeline.tokenize(asked)
        return _json(reply)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        asked = await self._asked(request, DetokenizeRequest)
        reply = await self._pipeline.detokenize(asked)
        return _json(reply)

    async def _asked(self, request: Request, kind: type[T]) -> T:
        body = await self._intake.body(request, kind)
        if body.model is not None:
            self._intake.find(body.model)
        return body

    async def models(self) -> ModelList:
        """List the served models."""
        return ModelList(data=list(self._pipeline.models()))

    async def model(self, model_id: str) -> Model:
        """Describe one served model."""
        return self._intake.find(model_id)

    async def health(self) -> JSONResponse:
        """Tell that this process lives."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """Tell whether every service of the path is alive; 503 names those that are not."""
        missing = list(self._pipeline.missing_roles())
        if missing:
            raise Unavailable(f"Not ready: no healthy {', '.join(missing)}.", missing=list(missing))
        return JSONResponse({"status": "ready"})

    async def version(self) -> JSONResponse:
        """Tell the version."""
        return JSONResponse({"version": self._version})


def _json(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(), media_type="application/json")
