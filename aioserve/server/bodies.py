"""Bodies as checked values: strict, and within limits.

Unknown fields are refused by name. A field may be null, which is the same as absent, or ask for
nothing (`hint_fields`).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope

from aioserve.server.errors import ApiError
from aioserve.server.hint_fields import HintReader
from aioserve.server.hint_tables import NO_HINTS, Hints

__all__ = [
    "ClientGone",
    "NoParameters",
    "Strict",
    "check_no_body",
    "converted",
    "parameters",
    "parse",
    "read_body",
]

T = TypeVar("T")

GOT_NULL = re.compile(r"got `null`")
UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]*)`")
OF_BROWSERS = frozenset([b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode"])
"""Headers of which a browser sends at least one with every body."""
MAX_FIELDS = 1000
"""Most fields of a body, including null ones. No API has a tenth as many."""
MAX_FIELD_CHARS = 200
"""Most characters of a field's name in an error: clients may send names of any length."""
MAX_REASON_CHARS = 400
"""Most characters of the reason in an error, which may quote a value."""
PLACE = re.compile(r" - at `\$\.?(?P<place>[^`]*)`\Z")
ENUM = re.compile(r"Invalid enum value (?P<value>.*) - at `", re.DOTALL)


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a body. Unknown fields are errors."""

    hints: ClassVar[Hints] = NO_HINTS
    """Unknown fields that are accepted, with the values by which each asks for nothing."""


class ClientGone(Exception):
    """The client has disconnected."""


async def read_body(
    scope: Scope, receive: Receive, *, max_bytes: int, any_content_type: bool = False
) -> bytes:
    """Return the whole body. Raises `ApiError` once it exceeds `max_bytes`, and `ClientGone`. With
    `any_content_type`, a body may have another type than JSON, unless a browser sends it."""
    _check_headers(scope, max_bytes, any_content_type=any_content_type)
    chunks: list[bytes] = []
    length = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        length += len(chunk)
        if length > max_bytes:
            raise _too_long(length, max_bytes)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _check_headers(scope: Scope, max_bytes: int, *, any_content_type: bool) -> None:
    headers = {name.lower(): value for name, value in scope["headers"]}
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    is_free = any_content_type and not OF_BROWSERS & headers.keys()
    if kind != b"application/json" and not is_free:
        # Browsers send other types to any site, without asking that site first.
        got = kind.decode("latin-1") or "none"
        raise ApiError(415, f"content-type must be application/json, got {got:.100}")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "content-encoding must be identity: bodies aren't decompressed")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and len(length) < 20 and int(length) > max_bytes:
        raise _too_long(int(length), max_bytes)


def _too_long(length: int, limit: int) -> ApiError:
    return ApiError(
        413, f"the body has {length} bytes or more; {limit} are read", code="body_too_large"
    )


def check_no_body(scope: Scope) -> None:
    """Raise `ApiError` for a request with a body, at a path that takes none."""
    headers = {name.lower(): value for name, value in scope["headers"]}
    if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
        raise ApiError(400, "this path takes no body")


def parse(body: bytes, kind: type[T], hints: HintReader | None = None) -> T:
    """Decode the JSON `body` as a `kind`, without what `hints` finds. Raises `ApiError` that names
    the wrong field."""
    hints = HintReader(lambda: True) if hints is None else hints
    try:
        with _without_collections():
            return _decoded(body, kind, hints)
    except msgspec.ValidationError as error:
        raise _refused(_with_choices(str(error), kind)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body isn't JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _decoded(body: bytes, kind: type[T], hints: HintReader) -> T:
    _check_fields(body)
    return _as_kind(body, kind, hints)


class _Field:
    """Name of a field of a body."""


def _check_fields(body: bytes) -> None:
    """Raise `ApiError` for too many fields, or for a field that is given twice. A gateway may read
    the first value, and the server the last."""
    seen: set[str] = set()

    def note(_: type, field: str) -> _Field:
        if field in seen:
            param = field[:MAX_FIELD_CHARS]
            raise ApiError(400, f"{param} is given several times", param=param)
        if len(seen) == MAX_FIELDS:
            why = f"the body must have at most {MAX_FIELDS} fields, got more"
            raise ApiError(400, why, code="limit_exceeded")
        seen.add(field)
        return _Field()

    msgspec.json.decode(body, type=dict[_Field, msgspec.Raw], dec_hook=note)


def _as_kind(body: bytes, kind: type[T], hints: HintReader) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not (UNKNOWN_FIELD.search(str(error)) or GOT_NULL.search(str(error))):
            raise
    return msgspec.json.decode(hints.without_hints(body, kind), type=kind)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in the block. A body makes none. But millions of lists would trigger
    hundreds of searches of the whole process, which hold up other calls for seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def converted(value: object, kind: Any, place: str) -> Any:
    """Convert `value`, a parsed part of a body at `place`, to a `kind`. Raises `ApiError`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refused(str(error), place) from None


VERSION_PARAMETERS = ("api-version", "beta")
"""Query parameters that choose a version of an API. They are ignored: there is one version."""


class NoParameters(Strict, frozen=True):
    """Parameters of an endpoint that takes none, in query or path."""


def parameters(scope: Scope, kind: type[T]) -> T:
    """Parameters of query and path as a `kind`. Raises `ApiError` that names a wrong one."""
    given: dict[str, str] = {}
    for name, value in QueryParams(scope.get("query_string", b"")).multi_items():
        if name in given:
            param = name[:MAX_FIELD_CHARS]
            raise ApiError(400, f"{param} is given several times", param=param)
        if name not in VERSION_PARAMETERS:
            given[name] = value
    try:
        return msgspec.convert({**given, **scope.get("path_params", {})}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from None


def _with_choices(message: str, kind: Any) -> str:
    """Add the texts that a field may have to `message`, if it is about another text."""
    at, enum = PLACE.search(message), ENUM.match(message)
    if at is None or enum is None:
        return message
    for field in msgspec.structs.fields(kind):
        parts = [field.type] if get_origin(field.type) is Literal else get_args(field.type)
        texts = [one for one in parts if get_origin(one) is Literal]
        if field.encode_name == at["place"] and len(texts) == len({*parts} - {type(None)}) > 0:
            choices = ", ".join([str(text) for one in texts for text in get_args(one)])
            return f"must be one of {choices}, got {enum['value']:.200}{at[0]}"
    return message


def _refused(message: str, within: str = "") -> ApiError:
    at = PLACE.search(message)
    place = "" if at is None else at["place"]
    if within:
        place = within + (place if place.startswith("[") else f".{place}" if place else "")
    unknown = UNKNOWN_FIELD.search(message)
    if unknown is not None:
        field = f"{place}.{unknown['field']}" if place else unknown["field"]
        field = field[:MAX_FIELD_CHARS]
        return ApiError(400, f"{field} isn't supported", param=field, code="unsupported_parameter")
    reason = PLACE.sub("", message)
    reason = reason[:1].lower() + reason[1:MAX_REASON_CHARS]
    if not place:
        missing = re.search(r"missing required field `([^`]*)`", message)
        return ApiError(400, reason, param=missing[1] if missing else None)
    return ApiError(400, f"{place}: {reason}", param=place)
