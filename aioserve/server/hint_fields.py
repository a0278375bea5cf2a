"""Removal of fields that ask for nothing from a body: nulls, and hints of the tables.

    {"temperature": 0, "odd": null, "tools": [{..., "cache_control": {}}]}
                              ─►  {"temperature": 0, "tools": [{...}]}

Values may be large, so they are read only as deep as hints may be in them. Hints are counted, and
named in the log.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from aioserve.server.call_log import CallLog
from aioserve.server.errors import ApiError, refuse
from aioserve.server.hint_tables import NO_HINTS, Hint, is_one_of

__all__ = ["HintReader", "let_through"]

logger: logging.Logger = logging.getLogger(__name__)

MAX_LOOKED_AT = 10_000
"""Most fields of a body and of objects in it that are looked at, if one of them asks for nothing.
They take about 10 ms of the event loop. Messages and schemas aren't looked into."""
NULL = b"null"
_INDEX = re.compile(r"\[\d+\]")

_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a text"}
_KINDS |= {dict: "an object", list: "a list"}


def let_through(call_log: CallLog, field: str, count: int = 1) -> None:
    """Count a hint of the call, and name it in the log."""
    if field not in call_log.hints:
        logger.debug(
            "call %s: let %s through, which changes nothing here", call_log.request_id, field
        )
    call_log.hints[field] = call_log.hints.get(field, 0) + count


class HintReader:
    """Reader of bodies. `reasons` tells if the model reasons, and is called only if that
    matters."""

    def __init__(self, reasons: Callable[[], bool]) -> None:
        self._reasons = reasons
        self._num_looked_at = 0
        self._known: dict[type, dict[str, inspect.Field]] = {}
        self.found: Counter[str] = Counter()
        """Number of hints at each place. All elements of a list are one place."""

    def without_hints(self, body: bytes, kind: type) -> bytes:
        """Return the body without hints, and without nulls for optional fields. Raises `ApiError`
        for unsupported values of a hint's field, and for too many fields."""
        return msgspec.json.encode(self._value(msgspec.Raw(body.strip()), _type_info(kind), ""))

    def _value(self, raw: msgspec.Raw, kind: inspect.Type, place: str) -> Any:
        first = memoryview(raw)[:1]
        if first == b"[" and (item := _item_of(kind)) is not None:
            items = msgspec.json.decode(raw, type=list[msgspec.Raw])
            return [
                self._value(each, item, f"{place}[{index}]") for index, each in enumerate(items)
            ]
        if first != b"{" or not _is_looked_into(kind):
            return raw
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        struct = _struct_of(fields, kind)
        if struct is not None:
            return self._fields(fields, struct, place)
        if (values := _values_of(kind)) is not None:
            self._look_at(len(fields))
            takes_null = _takes_null(values)
            return {
                name: value
                for name, value in fields.items()
                if takes_null or memoryview(value) != NULL
            }
        return raw

    def _fields(
        self, given: dict[str, msgspec.Raw], struct: inspect.StructType, place: str
    ) -> dict[str, Any]:
        if (known := self._known.get(struct.cls)) is None:
            known = {field.encode_name: field for field in struct.fields}
            self._known[struct.cls] = known
        self._look_at(1 + len(given))
        hints = getattr(struct.cls, "hints", NO_HINTS)
        kept: dict[str, Any] = {}
        for name, raw in given.items():
            where = f"{place}.{name}" if place else name
            field = known.get(name)
            if field is not None:
                takes = field.required or _takes_null(field.type)
                if takes or memoryview(raw) != NULL:
                    kept[name] = self._value(raw, field.type, where)
            elif name == struct.tag_field:
                kept[name] = raw
            elif memoryview(raw) != NULL:
                if name in hints:
                    self._drop_hint(where, raw, hints[name])
                else:
                    kept[name] = raw
        return kept

    def _drop_hint(self, where: str, raw: msgspec.Raw, hint: Hint) -> None:
        value = msgspec.json.decode(raw)
        if not is_one_of(value, hint.always):
            is_harmless = is_one_of(value, hint.without_reasoning)
            if not is_harmless or self._reasons():
                raise refuse(where, _refusal(hint, is_harmless), "unsupported_parameter")
        self.found[_INDEX.sub("", where)] += 1

    def _look_at(self, fields: int) -> None:
        self._num_looked_at += fields
        if self._num_looked_at > MAX_LOOKED_AT:
            raise ApiError(
                400,
                f"the body must have at most {MAX_LOOKED_AT} fields if one asks for nothing; got "
                "more, counted with those of objects in it",
                code="limit_exceeded",
            )


@cache
def _type_info(kind: type) -> inspect.Type:
    """Type of a body, cached: there are few."""
    return inspect.type_info(kind)


def _refusal(hint: Hint, is_harmless: bool) -> str:
    of = " by a model that reasons" if is_harmless else ""
    only = ", ".join([_shown(one) for one in hint.always])
    return f"isn't supported{of}" + (f"; only {only} is" if only else "")


def _shown(value: Any) -> str:
    return _KINDS[value] if isinstance(value, type) else msgspec.json.encode(value).decode()


def _alternatives(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _takes_null(kind: inspect.Type) -> bool:
    return any(
        isinstance(one, inspect.NoneType | inspect.AnyType | inspect.RawType)
        for one in _alternatives(kind)
    )


def _item_of(kind: inspect.Type) -> inspect.Type | None:
    """Return the type of a list's items if a value of `kind` may be a list that is looked into."""
    for one in _alternatives(kind):
        if isinstance(one, inspect.ListType) and _is_looked_into(one.item_type):
            return one.item_type
    return None


def _is_looked_into(kind: inspect.Type) -> bool:
    """Return true if a value of `kind` may have fields that ask for nothing."""
    return any(
        isinstance(one, inspect.StructType)
        or (isinstance(one, inspect.ListType) and _is_looked_into(one.item_type))
        or (isinstance(one, inspect.DictType) and not _takes_null(one.value_type))
        for one in _alternatives(kind)
    )


def _values_of(kind: inspect.Type) -> inspect.Type | None:
    """Return the type of an object's values, for an object without known fields."""
    found = [one for one in _alternatives(kind) if isinstance(one, inspect.DictType)]
    return found[0].value_type if found else None


def _struct_of(fields: dict[str, msgspec.Raw], kind: inspect.Type) -> inspect.StructType | None:
    """Struct type of an object. Its tag decides if there are several; None if there is no match."""
    structs = [one for one in _alternatives(kind) if isinstance(one, inspect.StructType)]
    for one in structs:
        tag = None if one.tag_field is None else fields.get(one.tag_field)
        if tag is not None and msgspec.json.decode(tag) == one.tag:
            return one
    return structs[0] if len(structs) == 1 and structs[0].tag_field is None else None
