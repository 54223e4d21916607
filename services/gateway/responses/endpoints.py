"""OpenAI's Responses endpoints: create, read again, cancel, delete. All state is in the log."""

from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import InvalidParameter
from schemas.responses import InputItems, Item, ResponsesRequest, StoredResponse
from services.gateway import spans
from services.gateway.delivery import Delivery, EventStream
from services.gateway.intake import Intake
from services.gateway.naming import in_words_of, renamed_in
from services.gateway.pipeline import Pipeline, generate_all
from services.gateway.responses.items import items_from, items_of, listed
from services.gateway.responses.log import ResponseLog, folded, followed, remembered
from services.gateway.responses.translate import ID_PREFIX, NAMES, not_found, request_id_of, translate_response
from services.gateway.responses.writing import ResponseFold, ResponseForm
from services.gateway.resumption import LAST_EVENT_ID, place_of, resumed
from services.gateway.translate import Translation, parse_body

MAX_PAGE = 100
DEFAULT_PAGE = 20


class ResponseEndpoints:
    """The routes' functions, over one pipeline and its log."""

    def __init__(self, pipeline: Pipeline, log: ResponseLog, intake: Intake) -> None:
        self._pipeline = pipeline
        self._log = log
        self._intake = intake

    async def create(self, request: Request) -> Response:
        """Answer an input, whole or as server-sent events; in the background, at once and without the answer."""
        raw = await self._intake.raw(request)
        body = parse_body(ResponsesRequest, raw)
        place = place_of(request.headers.get(LAST_EVENT_ID))
        default_id = place.id if place is not None else await self._intake.id_of(request, raw)
        before = await self._before(body.previous_response_id)
        with renamed_in(NAMES):
            translation = translate_response(body, before, self._intake.default_model, default_id)
        if place is not None:
            translation = resumed(translation, place)
        self._intake.find(translation.requests[0].model or "")
        spans.describe_request(ID_PREFIX + translation.id, translation.requests)
        form = ResponseForm(body, before, sum(translation.read))
        if body.background and place is None:
            return await self._in_background(translation, form)
        source = in_words_of(NAMES, generate_all(self._pipeline, translation.requests))
        if body.store is not False:
            source = remembered(self._log, form, source)
        delivery = Delivery(source, form)
        if translation.options.stream:
            return EventStream(delivery, self._intake.keepalive_s)
        return await delivery.whole(request.receive)

    async def _in_background(self, translation: Translation, form: ResponseForm) -> Response:
        with renamed_in(NAMES):
            accepted = await self._log.submit(translation.requests[0])
        record = form.record(accepted)
        await self._log.remember(record)
        if translation.options.stream:
            return EventStream(Delivery(followed(self._log, record), form), self._intake.keepalive_s)
        return _json(ResponseFold(record).body())

    async def retrieve(self, response_id: str, request: Request) -> Response:
        """Return a response as far as it has come, or stream it from its beginning or from behind an event."""
        record = await self._record(response_id)
        if request.query_params.get("stream", "").lower() != "true":
            return _json((await self._fold(record)).body())
        after = _number(request, "starting_after", -1)
        form = ResponseForm(record.body, record.before, after=after)
        return EventStream(Delivery(followed(self._log, record), form), self._intake.keepalive_s)

    async def cancel(self, response_id: str) -> Response:
        """End a response that runs or waits; one that has ended stays as it is."""
        record = await self._record(response_id)
        await self._log.cancel(record.request_id)
        return _json((await self._fold(record)).body())

    async def delete(self, response_id: str) -> Response:
        """Let a response not be found any more; its output leaves the log by age."""
        record = await self._record(response_id)
        await self._log.forget(record)
        return _json(b'{"id":"%b","object":"response","deleted":true}' % (ID_PREFIX + record.request_id).encode())

    async def input_items(self, response_id: str, request: Request) -> Response:
        """List what a response was asked with, the conversation before it included; newest first, as OpenAI does."""
        record = await self._record(response_id)
        items = listed((*record.before, *items_of(record.body)), record.request_id)
        if request.query_params.get("order", "desc") != "asc":
            items.reverse()
        ids = [item["id"] for item in items]
        if (after := request.query_params.get("after")) is not None:
            if after not in ids:
                raise InvalidParameter("There is no such item.", param="after")
            items = items[ids.index(after) + 1 :]
        limit = min(max(_number(request, "limit", DEFAULT_PAGE), 1), MAX_PAGE)
        page = items[:limit]
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        has_more = len(items) > limit
        listing = InputItems(object="list", data=page, first_id=ends[0], last_id=ends[1], has_more=has_more)
        return _json(listing.model_dump_json().encode())

    async def _before(self, response_id: str | None) -> tuple[Item, ...]:
        """Return the items of the conversation that ends with a response."""
        if response_id is None:
            return ()
        record = await self._record(response_id, "previous_response_id")
        fold = await self._fold(record)
        if fold.status not in ("completed", "incomplete"):
            raise InvalidParameter(
                f"The response is {fold.status}: there is no answer to go on from.", param="previous_response_id"
            )
        return (*record.before, *items_of(record.body), *items_from(fold.output.items))

    async def _record(self, response_id: str, param: str | None = None) -> StoredResponse:
        record = await self._log.recall(request_id_of(response_id, param))
        if record is None:
            raise not_found(response_id, param)
        return record

    async def _fold(self, record: StoredResponse) -> ResponseFold:
        fold = folded(record, await self._log.chunks(record.request_id))
        if fold is None:
            raise not_found(ID_PREFIX + record.request_id)
        return fold


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not value.isdecimal() or len(value) > 9:
        raise InvalidParameter(f"{name!r} must be a number.", param=name)
    return int(value)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
