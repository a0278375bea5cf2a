"""Fields of messages that no API here knows: dropped, counted, and named in the log.

Clients send answers back with fields that they, or another server, added. The model has no use for
them, and the conversation is answered all the same. Unknown fields of a request itself ask for
something, and are refused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import inspect

from aioserve.arguments import shown
from aioserve.server.call_log import CallLog
from aioserve.server.errors import ApiError

__all__ = ["PLACES", "KnownFields", "Place", "UnknownFields"]

logger: logging.Logger = logging.getLogger(__name__)

Place = Literal["message", "part", "tool_call"]
PLACES: tuple[Place, ...] = ("message", "part", "tool_call")
"""Places of fields, by which the counter is labelled. Names are text of clients, and never a
label."""
MAX_UNKNOWN = 10_000
"""Most unknown fields in each place of one request. Dropping them takes the event loop some
milliseconds."""
MAX_NAMES = 8
"""Most names in one line of the log."""


class UnknownFields:
    """Unknown fields of one request."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._num_null = 0
        self._names: dict[str, None] = {}

    def drop(self, place: Place, name: str, value: object) -> None:
        """Count a field. A null field asks for nothing, and isn't reported. Raises `ApiError` for
        too many, null or not."""
        if value is None:
            self._num_null += 1
        else:
            self._counts[place] += 1
        if max(self._counts[place], self._num_null) > MAX_UNKNOWN:
            raise ApiError(
                400,
                f"messages must have at most {MAX_UNKNOWN} unknown fields, got more",
                code="limit_exceeded",
            )
        if value is not None and len(self._names) < MAX_NAMES:
            self._names[name] = None

    def known(self, fields: Mapping[str, Any], names: Sequence[str], place: Place) -> Any:
        """Return the `fields` that have one of the `names` and a value, and drop the others."""
        for name, value in fields.items():
            if name not in names:
                self.drop(place, name, value)
        return {name: fields[name] for name in names if fields.get(name) is not None}

    def tell(self, call_log: CallLog) -> None:
        """Count them in the call's log, and name some in the log."""
        if not self._counts:
            return
        call_log.dropped = dict(self._counts)
        num_fields = self._counts.total()
        names = ", ".join(map(shown, self._names))
        logger.debug(
            "call %s: dropped %d unknown fields of messages, among them %s",
            call_log.request_id,
            num_fields,
            names,
        )


class KnownFields:
    """Fields of a type of msgspec: of a struct, or of a union or list of structs."""

    def __init__(
        self,
        kind: Any,
        place: Place,
        unread: Mapping[type, Sequence[str]] = {},
        places: Mapping[str, Place] = {},
    ) -> None:
        """Fields in `unread` are known, but aren't read, so that nothing in them is refused. Values
        of the fields in `places` are at that place, and all others at `place`."""
        self._unread = unread
        self._places = places
        self._place: Place = place
        self._kind = inspect.type_info(kind)
        self._fields: dict[type, dict[str, inspect.Field]] = {}

    def of(self, value: Any, unknown: UnknownFields) -> Any:
        """Return `value` without unknown fields, at any depth. Values of another shape stay
        unchanged, and are refused when they are converted."""
        return self._of(value, self._kind, self._place, unknown)

    def _of(self, value: Any, kind: inspect.Type, place: Place, unknown: UnknownFields) -> Any:
        if isinstance(value, list):
            of = _list_in(kind)
            return value if of is None else [self._of(one, of, place, unknown) for one in value]
        struct = _struct_of(value, kind)
        if struct is None:
            return value
        if (fields := self._fields.get(struct.cls)) is None:
            fields = {field.encode_name: field for field in struct.fields}
            self._fields[struct.cls] = fields
        unread = self._unread.get(struct.cls, ())
        kept: dict[str, Any] = {}
        for name, entry in value.items():
            if name in unread:
                if entry:
                    unknown.drop(place, name, entry)
            elif name in fields:
                if entry is None and not fields[name].required and not _takes_null(fields[name]):
                    continue
                inner = self._places.get(name, place)
                kept[name] = self._of(entry, fields[name].type, inner, unknown)
            elif name == struct.tag_field:
                kept[name] = entry
            else:
                unknown.drop(place, name, entry)
        return kept


def _takes_null(field: inspect.Field) -> bool:
    return any(
        isinstance(one, inspect.NoneType | inspect.AnyType) for one in _alternatives(field.type)
    )


def _list_in(kind: inspect.Type) -> inspect.Type | None:
    """Type of a list's items if a value of `kind` may be a list; else None."""
    for one in _alternatives(kind):
        if isinstance(one, inspect.ListType):
            return one.item_type
    return None


def _struct_of(value: Any, kind: inspect.Type) -> inspect.StructType | None:
    """Struct type of an object. Its tag decides if there are several; None if there is no match."""
    if not isinstance(value, dict):
        return None
    structs = [one for one in _alternatives(kind) if isinstance(one, inspect.StructType)]
    for one in structs:
        if one.tag_field is not None and value.get(one.tag_field) == one.tag:
            return one
    return structs[0] if len(structs) == 1 and structs[0].tag_field is None else None


def _alternatives(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)
