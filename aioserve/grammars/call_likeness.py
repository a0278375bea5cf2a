"""Tells whether JSON of a form could be taken for a call of a model that has no mark for calls.

    {"name": "weather", "parameters": {"city": "Oslo"}}

Such a call is an object with a name, a string, and arguments, an object. A form is said to have no
call if the types of these members rule it out. Where that can't be told, it may have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioserve.grammars.schema import referred
from aioserve.text.output_parsers.argument_types import types_of
from aioserve.text.output_parsers.call_object import ARGUMENTS

__all__ = ["may_be_call"]

MAX_STEPS = 64


def may_be_call(schema: Any, root: Any, *, lists: bool, steps: int = 0) -> bool:
    """Return true if a value of `schema` may be a call.

    With `lists` a list that begins with a call counts too. References lead into `root`.
    """
    if not isinstance(schema, dict) or steps > MAX_STEPS:
        return schema is not False
    root = root if isinstance(root, dict) else {}

    def may_be(one: Any) -> bool:
        return may_be_call(one, root, lists=lists, steps=steps + 1)

    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return any(_is_call(value, lists=lists) for value in values)
    if isinstance(ref := schema.get("$ref"), str) and not may_be(_target(root, ref)):
        return False
    if not all(map(may_be, _list(schema, "allOf"))):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(map(may_be, _list(schema, keyword))):
            return False
    types = types_of({key: value for key, value in schema.items() if key == "type"}, root)
    if lists and "array" in types:
        items = schema.get("items", True)
        first = [*(items if isinstance(items, list) else _list(schema, "prefixItems")), items][0]
        if may_be_call(first, root, lists=False, steps=steps + 1):
            return True
    return "object" in types and _has_members(schema, root)


def _has_members(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return true if an object may have a name and arguments."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    others = True if schema.get("patternProperties") else schema.get("additionalProperties", True)

    def may_be(name: str, kind: str) -> bool:
        member = properties.get(name, others)
        return member is not False and kind in types_of(member, root)

    return may_be("name", "string") and any(may_be(name, "object") for name in ARGUMENTS)


def _is_call(value: Any, *, lists: bool) -> bool:
    if lists and isinstance(value, list) and value:
        value = value[0]
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and any(isinstance(value.get(name), dict) for name in ARGUMENTS)
    )


def _target(root: Mapping[str, Any], ref: str) -> Any:
    target = referred(root, ref)
    return True if target is None else target


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
