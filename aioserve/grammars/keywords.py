"""Writes a schema as llguidance reads it.

Keywords without effect go, and references and bounds get a form that the library takes.
`"uniqueItems": false` and `"propertyNames": {"type": "string"}` have no effect. A keyword with an
effect stays, even if it isn't supported: the library refuses it by name.

Bounds become 64-bit numbers in the library, some of them the next ones. So a bound that it would
change moves inwards, to one that it keeps. All that is drawn is then within what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any
from urllib.parse import quote, unquote

__all__ = ["MAX_BOUND", "NOTES", "bounded", "spelled"]

NOTES = frozenset(
    ["$comment", "title", "description", "default", "examples", "deprecated", "readOnly"]
) | {"writeOnly"}
"""Keywords that don't change which values are valid."""
MAX_BOUND = 9223372036854770000
"""Largest bound, and size of the lowest, that the library keeps: 15 digits, below 2**63."""
_ENDLESS = 10**18
"""Lower bounds from here on need an upper one beside them in the library."""
_DIGITS = 15
_LEAST_EXPONENT = -22
"""Decimal numbers of so many digits, and at least this exponent, are read without rounding."""
_EXACT = 2**53
"""Whole numbers up to here are 64-bit numbers."""
_CONTEXT = Context(prec=2000, Emax=10**6, Emin=-(10**6))
_FORMATS = ("password", "binary")
"""Formats of OpenAPI that say how to show a string, or that it may be any."""


def spelled(schema: dict[str, Any]) -> bool:
    """Rewrite a schema, but none of those within it. Return true if anything changed."""
    before = len(schema)
    has_changed = False
    for keyword, value in list(schema.items()):
        if value is None and keyword not in ("const", "default"):
            del schema[keyword]
    while empty := [key for key in schema if key in _SAYS_NOTHING and _SAYS_NOTHING[key](schema)]:
        for keyword in empty:
            schema.pop(keyword)
    if isinstance(ref := schema.get("$ref"), str) and (named := _reference(ref)) != ref:
        schema["$ref"] = named
        has_changed = True
    return has_changed or len(schema) != before


def _reference(ref: str) -> str:
    """Return a reference within the schema, written in the one way that every reader takes."""
    return "#" + quote(unquote(ref[1:]), safe="/~$!&'()*+,;=:@-._") if ref[:2] == "#/" else ref


def _is_any(schema: object) -> bool:
    """Return true if a schema takes every value."""
    return schema is True or (isinstance(schema, dict) and not set(schema) - NOTES)


def _are_any(schemas: object, others: tuple[object, ...] = ()) -> bool:
    return isinstance(schemas, dict) and all(
        _is_any(each) or each in others for each in schemas.values()
    )


def _names_any(schema: object) -> bool:
    """Return true if a schema takes every name, which is a string."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return not set(schema) - NOTES - {"type"}
    return _is_any(schema)


def _is_none(schema: object) -> bool:
    """Return true if a schema plainly takes no value."""
    return schema is False or (
        isinstance(schema, dict)
        and not set(schema) - NOTES - {"not"}
        and _is_any(schema.get("not"))
    )


def _branches_on_nothing(schema: Mapping[str, Any]) -> bool:
    return all(_is_any(schema.get(branch, True)) for branch in ("then", "else"))


def _is_required(schema: Mapping[str, Any]) -> bool:
    """Return true if `required` names at least `minProperties` members anyway."""
    least, required = schema["minProperties"], schema.get("required", [])
    number = len(set(map(str, required))) if isinstance(required, list) else 0
    return _is_number(least) and least <= number


def _any_number_contained(schema: Mapping[str, Any]) -> bool:
    least = schema.get("minContains", 1)
    return not isinstance(least, bool) and least == 0 and "maxContains" not in schema


_SAYS_NOTHING: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda schema: schema["uniqueItems"] is False,
    "not": lambda schema: _is_none(schema["not"]),
    "propertyNames": lambda schema: _names_any(schema["propertyNames"]),
    "dependentRequired": lambda schema: _are_any(schema["dependentRequired"], ([],)),
    "dependentSchemas": lambda schema: _are_any(schema["dependentSchemas"]),
    "dependencies": lambda schema: _are_any(schema["dependencies"], ([],)),
    "unevaluatedProperties": lambda schema: (
        _is_any(schema["unevaluatedProperties"]) or "additionalProperties" in schema
    ),
    "unevaluatedItems": lambda schema: (
        _is_any(schema["unevaluatedItems"]) or isinstance(schema.get("items"), dict | bool)
    ),
    "minProperties": _is_required,
    "contains": _any_number_contained,
    "minContains": lambda schema: "contains" not in schema,
    "maxContains": lambda schema: "contains" not in schema,
    "if": _branches_on_nothing,
    "then": lambda schema: "if" not in schema,
    "else": lambda schema: "if" not in schema,
    "format": lambda schema: schema["format"] in _FORMATS,
}
"""Tests of whether a keyword has no effect in a schema that has it."""


def bounded(schema: dict[str, Any]) -> bool:
    """Move bounds of a schema inwards that the library would change.

    Returns true if there was one. Raises `ValueError` for one that would be moved past all numbers
    that the library has.
    """
    has_moved = False
    for keyword, is_upper in _BOUNDS.items():
        bound = schema.get(keyword)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound != bound:
            continue
        moved = _inwards(keyword, bound, is_upper)
        if moved != bound:
            schema[keyword] = moved
            has_moved = True
    for keyword, other, bound in (
        ("minimum", "maximum", MAX_BOUND),
        ("maximum", "minimum", -MAX_BOUND),
    ):
        exclusive, other_exclusive = (f"exclusive{name.title()}" for name in (keyword, other))
        if other in schema or other_exclusive in schema:
            continue
        ends = [schema[name] for name in (keyword, exclusive) if _is_number(schema.get(name))]
        if ends and max(map(abs, ends)) >= _ENDLESS and (ends[0] > 0) == (bound > 0):
            schema[other] = bound
            has_moved = True
    return has_moved


_BOUNDS = {"minimum": False, "exclusiveMinimum": False, "maximum": True, "exclusiveMaximum": True}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _inwards(keyword: str, bound: float, is_upper: bool) -> float:
    """Return the next bound that the library keeps, below an upper one and above a lower one."""
    if (bound < -MAX_BOUND) if is_upper else (bound > MAX_BOUND):
        raise _beyond(keyword, bound)
    if abs(bound) > MAX_BOUND:
        return MAX_BOUND if is_upper else -MAX_BOUND
    if bound == 0 or (abs(bound) <= _EXACT and math.floor(bound) == bound):
        return bound
    exact = Decimal(bound) if isinstance(bound, int) else Decimal(repr(bound))
    quantum = Decimal((0, (1,), max(exact.adjusted() - _DIGITS + 1, _LEAST_EXPONENT)))
    rounding = ROUND_FLOOR if is_upper else ROUND_CEILING
    kept = exact.quantize(quantum, rounding, _CONTEXT)
    while (Decimal(float(kept)) > exact) if is_upper else (Decimal(float(kept)) < exact):
        if isinstance(bound, float) and float(kept) == bound:
            break
        kept += -quantum if is_upper else quantum
    if abs(kept) > MAX_BOUND:
        raise _beyond(keyword, bound)
    return int(kept) if kept == kept.to_integral_value() else float(kept)


def _beyond(keyword: str, bound: float) -> ValueError:
    return ValueError(f"has {keyword} {bound!r:.40}, beyond all numbers of answers")
