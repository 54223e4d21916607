"""Whether a request that comes with a known id is the one that has this id. Pure.

What was asked goes as a digest with the work and into every chunk of its output, so that whoever holds either can tell.
"""

import hashlib
import json

from schemas.errors import InvalidParameter
from schemas.generation import GenerateRequest

DIGEST_BYTES = 8
NOT_ASKED = frozenset({"request_id", "model", "timeout_s", "deliver", "resume", "is_new_id"})
"""Fields that say how and for how long a request is sent: they do not change what is asked of this model."""


def digest_of(request: GenerateRequest) -> str:
    """Return what two requests share exactly if they ask for the same: of the known fields, in any order."""
    left_out = NOT_ASKED | (request.model_extra or {}).keys()
    asked = request.model_dump(mode="json", exclude=set(left_out), exclude_defaults=True)
    canonical = json.dumps(asked, sort_keys=True)  # orjson refuses numbers that only the validation behind it should
    return hashlib.blake2b(canonical.encode(), digest_size=DIGEST_BYTES).hexdigest()


def check_is_repeated(request_id: str, digest: str, known: str) -> None:
    """Raise InvalidParameter when `request_id` has another request's output; what an older version stored says none."""
    if known and digest != known:
        raise InvalidParameter(
            f"The request_id {request_id!r} was used before, for another request: repeat that one unchanged to get its "
            "output, or choose another id.",
            param="request_id",
        )
