"""Coming back: the place in a stream where a client left off, and the id of a request that may be sent twice. Pure."""

import hashlib
import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from schemas.errors import InvalidParameter
from services.gateway.translate import Translation

LAST_EVENT_ID = "Last-Event-ID"
IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARS = 255
_EVENT_ID = re.compile(r"([^/]{1,400})/(\d{1,9}(?:,\d{1,9})*)")


@dataclass(frozen=True, slots=True)
class Place:
    """`positions` chunks of each prompt's output have been read of the answer called `id`."""

    id: str
    positions: tuple[int, ...]


def event_id(answer_id: str, positions: list[int]) -> str:
    """Return the id of an event: the answer's, percent-encoded for a client may have chosen it, and the place."""
    return f"{quote(answer_id, safe='')}/{','.join(map(str, positions))}"


def place_of(header: str | None) -> Place | None:
    """Read a `Last-Event-ID` header, None without one; raises InvalidParameter for what is no id of ours."""
    if not header:
        return None
    match = _EVENT_ID.fullmatch(header)
    if match is None:
        raise InvalidParameter("This is no id of an event of ours.", param=LAST_EVENT_ID)
    return Place(unquote(match[1]), tuple(int(position) for position in match[2].split(",")))


def resumed(translation: Translation, place: Place) -> Translation:
    """Return the translation that reads an existing answer on from `place`; raises InvalidParameter for another one."""
    if not translation.options.stream:
        raise InvalidParameter("Only a stream can be resumed: 'stream' must be true.", param="stream")
    if translation.id != place.id or len(translation.requests) != len(place.positions):
        raise InvalidParameter("The event is of another request than this one.", param=LAST_EVENT_ID)
    requests = tuple(request.model_copy(update={"resume": True}) for request in translation.requests)
    return replace(translation, requests=requests, read=place.positions)


def repeatable_id(key: str, client: str, path: str, body: bytes) -> str:
    """Return the id of a request with an `Idempotency-Key`: the same for the same client, key and request only."""
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise InvalidParameter(f"The key must have 1 to {MAX_KEY_CHARS} characters.", param=IDEMPOTENCY_KEY)
    digest = hashlib.sha256()
    for part in (key.encode(), client.encode(), path.encode(), body):
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"idem-{digest.hexdigest()[:32]}"
