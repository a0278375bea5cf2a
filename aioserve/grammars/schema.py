"""Schemas that llguidance would take, and must not be given.

What it can't keep it refuses itself, with a reason. What is refused here in its place:

- `x-guidance`, its own keyword: it switches off other keywords,
- `minProperties` where names may come twice: it counts those that JSON then drops,
- strings of many patterns at once: to see whether any string has them all takes time and memory
  that double with each, without a limit.

Where a keyword means what it says is known by `_PLACES`; elsewhere (in `enum`, say) it is data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from aioserve.errors import InvalidSamplingError

__all__ = ["check_lark", "check_schema"]

MAX_DEPTH = 64
MAX_JOINED = 8
"""Patterns and formats of one string. Eight take milliseconds, and each further one twice that."""
MAX_PLACES = 20_000
"""Places of strings in a schema, counted once for each way that leads there."""

_PLACES: dict[str, str] = {
    "additionalProperties": "schema",
    "items": "schema",
    "allOf": "list",
    "anyOf": "list",
    "oneOf": "list",
    "prefixItems": "list",
    "properties": "map",
    "patternProperties": "map",
    "$defs": "map",
    "definitions": "map",
}
"""Where schemas are within a schema, of the keywords that llguidance supports."""

_Path = tuple[str, ...]


def check_schema(text: str, argument: str) -> None:
    """Raise `InvalidSamplingError` for a schema, in JSON, that is refused. `argument` names what it
    came in."""
    schema = json.loads(text)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise _refused(argument, "has the keyword x-guidance, which is none of JSON Schema")
    _check_each(schema, argument, 0)
    _Joined(schema, argument).of(schema, ())


def check_lark(text: str) -> None:
    """Raise `InvalidSamplingError` for a grammar that is refused, schemas in it included."""
    for start in re.finditer(r"%json\b\s*", text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, start.end())
        except (ValueError, RecursionError):
            continue  # where it is one in a comment or a string; llguidance reads it as well
        check_schema(text[start.end() : end], "grammar")
    bare = re.sub(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*', "", text)
    if (joined := bare.count("&")) > MAX_JOINED - 1:
        raise _refused("grammar", f"joins {joined + 1} expressions by &", MAX_JOINED)


def _check_each(schema: Any, argument: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _refused(argument, f"is nested more than {MAX_DEPTH} deep", MAX_DEPTH)
    if not isinstance(schema, dict):
        return
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int | float) and least > 1:
        named = len(set(map(str, required))) if isinstance(required, list) else 0
        if least > named + 1:
            raise _refused(
                argument,
                f"has minProperties {least} and {named} required names: names may come twice, so "
                "only one more than are required can be kept",
                named + 1,
            )
    for inner in _within(schema):
        _check_each(inner, argument, depth + 1)


def _within(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword, form in _PLACES.items():
        value = schema.get(keyword)
        if form == "schema":
            yield value
        elif form == "list" and isinstance(value, list):
            yield from value
        elif form == "map" and isinstance(value, dict):
            yield from value.values()


class _Joined:
    """How many patterns and formats strings must match at once, by their places in the value."""

    def __init__(self, root: Any, argument: str) -> None:
        self._root = root
        self._argument = argument
        self._num_places = 0
        self._known: dict[str, Counter[_Path]] = {}
        """Of what is referred to."""

    def of(self, schema: Any, refs: tuple[str, ...]) -> Counter[_Path]:
        """`refs` are the references that led here."""
        counts: Counter[_Path] = Counter()
        if not isinstance(schema, dict):
            return counts
        counts[()] = ("pattern" in schema) + ("format" in schema)
        for inner in _list(schema, "allOf"):
            counts.update(self.of(inner, refs))
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in refs:
            if ref not in self._known:
                self._known[ref] = self.of(self._target(ref), (*refs, ref))
            counts.update(self._known[ref])
        for keyword in ("anyOf", "oneOf"):
            either: Counter[_Path] = Counter()
            for inner in _list(schema, keyword):
                either |= self.of(inner, refs)
            counts.update(either)
        parts: Counter[_Path] = Counter()
        for step, inner in _parts(schema):
            parts |= Counter({(step, *path): n for path, n in self.of(inner, refs).items()})
        counts.update(parts)
        counts = +counts
        self._num_places += len(counts)
        if self._num_places > MAX_PLACES:
            raise _refused(self._argument, "has too many strings with a pattern", MAX_PLACES)
        if counts and (most := max(counts.values())) > MAX_JOINED:
            raise _refused(
                self._argument, f"has a string with {most} patterns and formats", MAX_JOINED
            )
        return counts

    def _target(self, ref: str) -> Any:
        """What is referred to within the schema; None where llguidance must say."""
        if not ref.startswith("#"):
            return None
        at = self._root
        for part in ref[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, dict) and name in at:
                at = at[name]
            else:
                return None
        return at


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Schemas of the parts of a value, each with its place."""
    for keyword in ("properties", "patternProperties"):
        value = schema.get(keyword)
        if isinstance(value, dict):
            for name, inner in value.items():
                yield "." + (name if keyword == "properties" else ""), inner
    yield ".", schema.get("additionalProperties")
    for inner in (schema.get("items"), *_list(schema, "prefixItems")):
        yield "[]", inner


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _refused(argument: str, why: str, limit: object = None) -> InvalidSamplingError:
    most = "" if limit is None else f"; {limit} are taken at most"
    return InvalidSamplingError(
        f"{argument} must be one that can be kept: it {why}{most}", argument=argument, limit=limit
    )
