"""Requests for an embedding: which options they may have, and what the executors must be able to give. Pure."""

from collections.abc import Sequence

from schemas.control import ExecutorCapacity
from schemas.errors import InvalidParameter, UnsupportedParameter
from schemas.generation import GenerateRequest
from schemas.sampling import Pooling

OPTIONS = frozenset(
    {
        "model",
        "request_id",
        "is_new_id",
        "prompt",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "pooling",
        "dimensions",
        "priority",
        "cache_salt",
        "skip_reading_prefix_cache",
        "timeout_s",
        "deliver",
        "resume",
    }
)
"""All other fields are about text that is generated."""

VALUE_BYTES = 4 * 4 / 3
"""A float32 value in base64."""
ENVELOPE_BYTES = 4096
"""What else a message that carries a vector holds, at most."""


def check_embedding_options(request: GenerateRequest) -> None:
    """Raise the coded error of an option that does not go with `pooling`, or of one that needs it."""
    if request.pooling is None:
        if request.dimensions is not None:
            raise InvalidParameter("dimensions is only for an embedding; set pooling as well.", param="dimensions")
        return
    fields = GenerateRequest.model_fields
    for name in sorted(request.model_fields_set & fields.keys() - OPTIONS):
        if getattr(request, name) not in (None, fields[name].default):
            raise UnsupportedParameter(f"{name!r} has no meaning for an embedding; leave it out.", param=name)
    if (request.model_extra or {}).get("normalize") is False:
        raise UnsupportedParameter("Embeddings are always normalised; leave 'normalize' out.", param="normalize")


def check_embedding_capacity(
    request: GenerateRequest, capacities: Sequence[ExecutorCapacity], max_message_bytes: int
) -> None:
    """Raise the coded error of an embedding that no executor can give, or no message carry.

    While there is no executor, nothing is known: the request waits for one.
    """
    if request.pooling is None or not capacities:
        return
    size = max(capacity.embedding_size for capacity in capacities)
    if not size:
        engines = ", ".join(sorted({capacity.engine for capacity in capacities}))
        raise UnsupportedParameter(
            f"This model gives no embeddings: its engine ({engines}) has no hidden states. Set executor.engine to one "
            "that runs a model.",
            param="model",
        )
    if request.dimensions is not None and request.dimensions > size:
        raise InvalidParameter(f"dimensions must be from 1 to {size}, the model's own.", param="dimensions")
    vector_bytes = int((request.dimensions or size) * VALUE_BYTES) + ENVELOPE_BYTES
    if vector_bytes > max_message_bytes:
        raise UnsupportedParameter(
            f"A vector of {request.dimensions or size} values takes {vector_bytes} bytes, but a message of the bus "
            f"{max_message_bytes} at most; ask for fewer dimensions.",
            param="dimensions",
        )


def pooling_of(request: GenerateRequest) -> Pooling | None:
    """Return how the request's embedding is made, None of one that wants text."""
    return None if request.pooling is None else Pooling(kind=request.pooling, dimensions=request.dimensions)
