"""Description of the APIs in OpenAPI 3.1, from the same table that serves them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

import msgspec

from aioserve.server.app_state import Call
from aioserve.server.endpoint import Endpoint
from aioserve.server.hint_tables import NO_HINTS
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.settings import ServerSettings

__all__ = ["describing", "document"]

REFUSALS = {
    400: "The body, or a value in it, can't be served",
    403: "The page of another site asks",
    404: "There is no such model, or nothing of that id",
    408: "The body didn't come in time",
    409: "The id is in use, or the call was aborted",
    413: "The body is too large",
    415: "The body isn't JSON",
    429: "Refused by a policy or a plugin; another time it may be taken",
    500: "The server failed",
    503: "Too much waits, or the server goes away",
    504: "The deadline has passed",
}


def describing(endpoints: Sequence[Endpoint[Any]]) -> Endpoint[None]:
    """Endpoint that answers with the description of `endpoints`."""

    async def describe(call: Call, _: None) -> dict[str, Any]:
        return document(endpoints, call.settings)

    return Endpoint("/openapi.json", describe, OPENAI_ERRORS, "This description")


def document(endpoints: Sequence[Endpoint[Any]], settings: ServerSettings) -> dict[str, Any]:
    """Description of `endpoints`, with the limits of `settings`. If there are keys, each call needs
    one as a bearer token."""
    kinds = {kind for each in endpoints for kind in (each.kind, each.answer, each.errors.kind)}
    known = sorted(kinds - {None}, key=str)
    schemas, components = msgspec.json.schema_components(
        known, ref_template="#/components/schemas/{name}"
    )
    named = dict(zip(known, schemas, strict=True))
    for kind in known:
        for field, setting in getattr(kind, "limits", {}).items():
            schema = components[getattr(kind, "__name__", "")]["properties"][field]
            _limit(schema, getattr(settings, setting))
        for field, hint in getattr(kind, "hints", NO_HINTS).items():
            properties = components[getattr(kind, "__name__", "")]["properties"]
            properties[field] = {"anyOf": [_shape(one) for one in (*hint.always, None)]}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.shown_path, {})[endpoint.method.lower()] = _operation(
            endpoint, named
        )
    written: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "aioserve", "version": metadata.version("aioserve")},
        "paths": paths,
        "components": {"schemas": components},
    }
    if settings.api_keys:
        written["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        written["security"] = [{"key": []}]
    return written


TYPES: dict[type[Any], str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
}


def _shape(value: Any) -> dict[str, Any]:
    """Return the schema of a value that is let through, or of all values of a type."""
    return {"type": TYPES[value]} if isinstance(value, type) else {"const": value}


KEYWORDS = {"integer": "maximum", "array": "maxItems", "object": "maxProperties"}


def _limit(schema: dict[str, Any], limit: int) -> None:
    """Limit a schema, or its alternatives that have a size, to `limit`."""
    for one in schema.get("anyOf", [schema]):
        if (keyword := KEYWORDS.get(one.get("type"))) is not None:
            one[keyword] = limit


def _operation(endpoint: Endpoint[Any], named: dict[Any, Any]) -> dict[str, Any]:
    kind = endpoint.kind
    answer = {"schema": named.get(endpoint.answer, {})}
    text = {"schema": {"type": "string"}}
    answers = {
        media_type: answer if media_type == "application/json" else text
        for media_type in endpoint.media_types
    }
    operation: dict[str, Any] = {
        "operationId": endpoint.method.lower() + re.sub(r"\W+", "_", endpoint.shown_path),
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The answer", "content": answers},
            **dict(_refusals(named[endpoint.errors.kind])),
        },
    }
    if kind is not None and not endpoint.reads_body:
        operation["parameters"] = list(_parameters(endpoint.shown_path, kind))
    elif kind is not None:
        content = {"application/json": {"schema": named[kind]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(path: str, kind: Any) -> Iterable[dict[str, Any]]:
    """Describe the parameters of path and query."""
    for field in msgspec.structs.fields(kind):
        in_path = f"{{{field.encode_name}}}" in path
        yield {
            "name": field.encode_name,
            "in": "path" if in_path else "query",
            "required": field.required,
            "schema": msgspec.json.schema(field.type),
        }


def _refusals(error: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for status, meaning in REFUSALS.items():
        content = {"application/json": {"schema": error}}
        yield str(status), {"description": meaning, "content": content}
