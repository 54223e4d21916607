"""What every endpoint does with a request before it knows what is asked: body, id, place, model."""

from dataclasses import replace
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from schemas.errors import ModelNotFound
from schemas.openai import Model
from services.gateway.connection import read_json_body
from services.gateway.embeddings import AskedEmbeddings
from services.gateway.exchange import exchange_id
from services.gateway.pipeline import Pipeline
from services.gateway.resumption import IDEMPOTENCY_KEY, repeatable_id
from services.gateway.settings import Settings
from services.gateway.translate import Translation, parse_body

B = TypeVar("B", bound=BaseModel)
Asked = TypeVar("Asked", Translation, AskedEmbeddings)


class Intake:
    """Reads requests for one pipeline."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self._pipeline = pipeline
        self._max_body_bytes = settings.gateway.max_body_bytes
        self.default_model = settings.model.name
        self.keepalive_s = settings.gateway.keepalive_s

    async def raw(self, request: Request) -> bytes:
        """Return the body as it came."""
        return await read_json_body(request, self._max_body_bytes)

    async def body(self, request: Request, kind: type[B]) -> B:
        """Return the body."""
        return parse_body(kind, await self.raw(request))

    async def id_of(self, request: Request, body: bytes) -> str:
        """Return a new id, or the one that an earlier request with the same `Idempotency-Key` got."""
        key = request.headers.get(IDEMPOTENCY_KEY)
        if key is None:
            return exchange_id(request.scope)
        client = request.headers.get("authorization", "") + request.headers.get("x-api-key", "")
        return await self._pipeline.usable_id(repeatable_id(key, client, request.url.path, body))

    def told_if_new(self, request: Request, translation: Asked) -> Asked:
        """Return what is asked with a word to the tokenizer when the id is our own and so has no older output."""
        if translation.id != exchange_id(request.scope):
            return translation
        requests = tuple(asked.model_copy(update={"is_new_id": True}) for asked in translation.requests)
        return replace(translation, requests=requests)

    def find(self, name: str) -> Model:
        """Return the served model of that name; raises ModelNotFound."""
        served = {model.id: model for model in self._pipeline.models()}
        if name not in served:
            known = ", ".join(sorted(served))
            raise ModelNotFound(f"The model {name[:200]!r} is not served here. Served: {known}.", param="model")
        return served[name]
