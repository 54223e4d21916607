"""Anthropic's endpoints: a message, whole or streamed, and the count of its prompt's tokens."""

from starlette.requests import Request
from starlette.responses import Response

from schemas.anthropic import CountTokensRequest, MessagesRequest, TokenCount
from services.gateway import spans
from services.gateway.delivery import Delivery, EventStream
from services.gateway.error_shape import request_id_of
from services.gateway.intake import Intake
from services.gateway.messages.translate import NAMES, translate_count, translate_messages
from services.gateway.messages.writing import MessageForm
from services.gateway.naming import in_words_of, renamed_in
from services.gateway.pipeline import Pipeline, generate_all
from services.gateway.resumption import LAST_EVENT_ID, place_of, resumed
from services.gateway.translate import parse_body


class MessageEndpoints:
    """The routes' functions, over one pipeline."""

    def __init__(self, pipeline: Pipeline, intake: Intake) -> None:
        self._pipeline = pipeline
        self._intake = intake

    async def create(self, request: Request) -> Response:
        """Answer a conversation with a message, whole or as server-sent events."""
        raw = await self._intake.raw(request)
        place = place_of(request.headers.get(LAST_EVENT_ID))
        default_id = place.id if place is not None else await self._intake.id_of(request, raw)
        body = parse_body(MessagesRequest, raw)
        with renamed_in(NAMES):
            translation = translate_messages(body, self._intake.default_model, default_id)
        if place is not None:
            translation = resumed(translation, place)
        self._intake.find(translation.requests[0].model or "")
        spans.describe_request(f"msg_{translation.id}", translation.requests)
        form = MessageForm(request_id_of(request.scope), sum(translation.read))
        delivery = Delivery(in_words_of(NAMES, generate_all(self._pipeline, translation.requests)), form)
        if translation.options.stream:
            return EventStream(delivery, self._intake.keepalive_s)
        return await delivery.whole(request.receive)

    async def count_tokens(self, request: Request) -> Response:
        """Return how many tokens an answer's prompt would have."""
        asked = translate_count(await self._intake.body(request, CountTokensRequest), self._intake.default_model)
        self._intake.find(asked.model or "")
        reply = await self._pipeline.tokenize(asked)
        return Response(TokenCount(input_tokens=reply.count).model_dump_json(), media_type="application/json")
