"""/openapi.json, from the structs of requests and replies."""

from __future__ import annotations

from typing import Any

import msgspec

from mlxserve.server import anthropic, schema
from mlxserve.server.problems import AnthropicErrorReply, ErrorReply, error_form

REF = "#/components/schemas/{name}"

# path, method, summary, request, reply
OPERATIONS: tuple[tuple[str, str, str, type | None, type | None], ...] = (
    ("/v1/chat/completions", "post", "Answer a chat", schema.ChatRequest, schema.ChatReply),
    ("/v1/completions", "post", "Continue a text", schema.CompletionRequest, schema.TextReply),
    ("/v1/messages", "post", "Answer a chat", anthropic.MessagesRequest, anthropic.MessageReply),
    (
        "/v1/messages/count_tokens",
        "post",
        "Tokens of a chat",
        anthropic.CountRequest,
        anthropic.CountReply,
    ),
    ("/v1/models", "get", "The models served here", None, schema.ModelList),
    ("/v1/models/{name}", "get", "One of them", None, schema.ModelReply),
    ("/tokenize", "post", "Text to token ids", schema.TokenizeRequest, schema.TokenizeReply),
    ("/detokenize", "post", "Token ids to text", schema.DetokenizeRequest, schema.DetokenizeReply),
    ("/health", "get", "Whether the engine makes progress", None, None),
    ("/ready", "get", "Whether new requests are taken", None, None),
    ("/metrics", "get", "Figures for Prometheus", None, None),
)


def document(version: str) -> dict[str, Any]:
    """The description of all endpoints, OpenAPI 3.1."""
    structs = [s for _, _, _, *pair in OPERATIONS for s in pair if s is not None]
    structs += [ErrorReply, AnthropicErrorReply]
    schemas, components = msgspec.json.schema_components(structs, ref_template=REF)
    by_struct = dict(zip(structs, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, method, summary, asked, told in OPERATIONS:
        error = error_form(path)
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {
                "200": _content("An answer", by_struct[told] if told else {}),
                "4XX": _content("The request is wrong", by_struct[error]),
                "5XX": _content("It can't be answered", by_struct[error]),
            },
        }
        if asked is not None:
            operation["requestBody"] = {**_content("", by_struct[asked]), "required": True}
            del operation["requestBody"]["description"]
        if "{name}" in path:
            operation["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxserve", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }


def _content(description: str, schema_: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema_}}}
