"""The request bodies in the OpenAPI document. Pure.

A body has the fields that the gateway translates, and those of `GenerateRequest` that are passed on as they are.
"""

from typing import Any

from pydantic import BaseModel

from schemas.anthropic import CountTokensRequest, MessagesRequest
from schemas.generation import GenerateRequest
from schemas.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from schemas.responses import ResponsesRequest
from schemas.tokenization import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})
NOT_PASSED_ON = frozenset({"prompt", "messages", "logprobs", "pooling", "dimensions", "deliver", "resume", "is_new_id"})
"""Fields of a `GenerateRequest` that a generating body does not have, or has in another form."""
PASSED_ON: dict[str, frozenset[str]] = {
    **dict.fromkeys(GENERATING, frozenset(GenerateRequest.model_fields) - NOT_PASSED_ON),
    "/v1/embeddings": frozenset(
        {"request_id", "add_special_tokens", "truncate_prompt_tokens", "priority", "cache_salt", "timeout_s"}
    ),
}
"""Path → fields of a `GenerateRequest` that its body may have as they are."""
REF_TEMPLATE = "#/components/schemas/{model}"


def add_request_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the request body of each endpoint that has one."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path, body in BODIES.items():
        schema = body.model_json_schema(ref_template=REF_TEMPLATE)
        passed_on = GenerateRequest.model_json_schema(ref_template=REF_TEMPLATE)
        if path in GENERATING:
            schemas.update(passed_on["$defs"])
        for name, field in passed_on["properties"].items():
            if name in PASSED_ON.get(path, ()):
                schema["properties"].setdefault(name, field)
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
        reference = {"$ref": REF_TEMPLATE.format(model=body.__name__)}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return document
