"""How much one request may ask for: what `ServerSettings` says, field by field.

What the engine can't do at all is the engine's to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from aioserve.server.answers.sampling import SamplingFields
from aioserve.server.errors import ApiError
from aioserve.server.settings import ServerSettings

__all__ = ["check_at_most", "check_chars", "check_metadata", "check_sampling", "check_schema"]


def check_at_most(field: str, must: str, value: int, limit: int) -> None:
    """Raise `ApiError` where `value` is above the server's `limit`, which `must` has braces for."""
    if value > limit:
        raise ApiError(
            400,
            f"{field} must {must.format(limit)}, which is this server's limit, got {value}",
            param=field,
            code="limit_exceeded",
        )


def check_chars(field: str, text: str, most: int, of: str = "") -> None:
    check_at_most(field, f"have {of}at most {{}} characters", len(text), most)


def check_metadata(metadata: Mapping[str, str] | None, settings: ServerSettings) -> None:
    given = metadata or {}
    check_at_most("metadata", "have at most {} entries", len(given), settings.max_metadata)
    for key, value in given.items():
        check_chars("metadata", key, settings.max_metadata_key_chars, "keys of ")
        check_chars(f"metadata.{key}", value, settings.max_metadata_value_chars)


def check_sampling(body: SamplingFields, settings: ServerSettings) -> None:
    """Of the fields that all APIs share."""
    check_at_most("n", "be at most {}", body.n or 1, settings.max_n)
    stops = body.stop if isinstance(body.stop, list) else ()
    num_stops = 1 if isinstance(body.stop, str) else len(stops)
    check_at_most("stop", "have at most {} strings", num_stops, settings.max_stops)
    if body.structured_outputs is not None:
        check_schema("structured_outputs", body.structured_outputs.json, settings)


def check_schema(field: str, schema: Any, settings: ServerSettings) -> None:
    """A schema as a value, or as JSON text."""
    if schema is None:
        return
    size = len(schema.encode()) if isinstance(schema, str) else len(msgspec.json.encode(schema))
    limit = settings.max_schema_bytes
    check_at_most(field, "have a schema of at most {} bytes", size, limit)
