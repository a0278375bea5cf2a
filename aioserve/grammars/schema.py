"""Refuses or narrows schemas that llguidance would take, but must not be given.

The library refuses what it doesn't support, with a reason. Refused here in its place:

- `x-guidance`, its own keyword, as it switches off other keywords,
- `minProperties` where names may come twice, as it counts those that JSON then drops,
- strings of many patterns at once, as time and memory to see whether any string has them all double
  with each, without a limit,
- values that are always within themselves, so that they have no finite text,
- references except those that lead by `#/...` to a schema that is checked here as well,
- grammars of very many rules, as it goes from one into the next on the stack, which ends the
  process.

Schemas with names are narrowed. The library tells names that a schema doesn't know from those that
it does by how they are written. So `"\\u0061"` would be another name than `"a"`. So beside names or
patterns, further names are those that can be written in only one way, without a backslash. There
are none if a schema restricts their values, or beside patterns.

All that is drawn is valid all the same. A narrower schema could make `oneOf` take values that two
of its schemas accept. So a schema with `oneOf` is refused unless all names that it mentions are
kept.

`_PLACES` lists where a keyword has its meaning; elsewhere (in `enum`, say) it is data.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import partial
from typing import Any
from urllib.parse import unquote

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.endings import endless_reference
from aioserve.grammars.keywords import MAX_BOUND, bounded, spelled

__all__ = [
    "NOT_BARE",
    "check_ends",
    "json_rule",
    "json_spacing",
    "referred",
    "sound_lark",
    "sound_schema",
    "spelled_anew",
]

MAX_DEPTH = 64
MAX_JOINED = 8
"""Most patterns and formats of one string. Eight take milliseconds, each further one doubles
that.
"""
MAX_RULES = 1000
"""Most rules and brackets of a grammar.

Each takes up to 4 KiB of a thread's stack, which is usually 8 MiB.
"""
MAX_SCHEMAS = 10_000
"""Most schemas within a schema.

A schema that is referred to by its way through others counts once more, with all within it. They
take some two seconds.
"""
MAX_PLACES = 20_000
"""Most places of strings in a schema, counted once for each way that leads there."""

_PLAIN_NAME = r'^[^"\\\x00-\x1f\x7f]*$'
"""Pattern of names that JSON can write in only one way, except by `\\u`."""
_NOT_PLAIN = re.compile(r'["\\\x00-\x1f\x7f]')
_MOVES = ("$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef")
"""Keywords by which a reference would lead elsewhere than its pointer says."""

_PLACES: dict[str, str] = {
    "additionalProperties": "schema",
    "additionalItems": "schema",
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
"""Places of schemas within a schema, by the keywords that llguidance supports."""

_Path = tuple[str, ...]


def json_spacing(max_whitespace: int | None) -> dict[str, Any]:
    """Return llguidance's options for white space between the parts of JSON.

    At each place there are at most that many characters. None: one space after a colon and a comma,
    or none. A model that has little to say fills all the space it may with blanks.
    """
    if max_whitespace:
        return {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{max_whitespace}}}"}
    if max_whitespace == 0:
        return {"whitespace_flexible": False}
    return {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def json_rule(name: str, schema: str, argument: str, max_whitespace: int | None) -> str:
    """Return a rule of Lark for the JSON of a schema, which is an object or a boolean in JSON.

    Raises `InvalidSamplingError` like `sound_schema`, and `ValueError` for a schema that nothing
    fits.
    """
    kept = json.loads(sound_schema(schema, argument))
    if kept is False:
        raise ValueError("Unsatisfiable schema: schema is false")
    spacing = {"x-guidance": json_spacing(max_whitespace)}
    return f"{name}: %json {json.dumps((kept if isinstance(kept, dict) else {}) | spacing)}"


def sound_schema(text: str, argument: str) -> str:
    """Return a schema, in JSON, whose texts from llguidance are all accepted by the one in `text`.

    Raises `InvalidSamplingError` for one that is refused. `argument` names the parameter that it
    came in.
    """
    schema = json.loads(text)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise _refused(argument, "has the keyword x-guidance, which is none of JSON Schema")
    checked: list[dict[str, Any]] = []
    is_spelled = _check_each(schema, argument, 0, checked)
    _Joined(schema, argument, checked).of(schema, ())
    if endless := _endless(schema, argument):
        raise _refused(
            argument, f"has no value that ends at {endless[:100]}, which always has itself within"
        )
    has_one_of = any(len(_list(each, "oneOf")) > 1 for each in checked)
    moved = [_move_bounds(each, argument, has_one_of) for each in checked]
    narrowed = [_narrow(each, argument, has_one_of) for each in checked]
    if not any(narrowed):
        return json.dumps(schema) if is_spelled or any(moved) else text
    if has_one_of and (name := next(filter(_NOT_PLAIN.search, _names(schema)), None)):
        raise _refused(
            argument,
            f"has oneOf, objects without additionalProperties: false, and the name {name!r}",
        )
    return json.dumps(schema)


def sound_lark(text: str) -> str:
    """Return the grammar with the schemas in it made sound.

    Raises `InvalidSamplingError` for one that is refused.
    """
    bare = NOT_BARE.sub(lambda match: " " * len(match[0]), text)
    sound: list[str] = []
    done = 0
    num_rules = _num_rules(bare)
    for start in re.finditer(r"%json\b\s*", text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, start.end())
        except (ValueError, RecursionError):
            continue  # llguidance also reads it where it stands in a comment or string
        if bare.startswith("%json", start.start()):
            num_rules -= _num_rules(bare[start.end() : end])
        schema = text[start.end() : end]
        if (kept := sound_schema(schema, "grammar")) == schema:
            continue
        if start.start() < done or not bare.startswith("%json", start.start()):
            raise _refused("grammar", "quotes a schema without additionalProperties: false")
        sound += [text[done : start.end()], kept]
        done = end
    if num_rules > MAX_RULES:
        raise _refused("grammar", f"has {num_rules} rules and brackets", MAX_RULES)
    bare = NOT_BARE.sub("", text)
    if (joined := bare.count("&")) > MAX_JOINED - 1:
        raise _refused("grammar", f"joins {joined + 1} expressions by &", MAX_JOINED)
    return "".join([*sound, text[done:]])


def _num_rules(bare: str) -> int:
    """Return the number of rules of a part of a grammar, and of its brackets."""
    return sum(map(bare.count, ":([{"))


NOT_BARE = re.compile(r'"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\]|\\.)+/?|(?://|#)[^\n]*')
"""Texts, expressions and comments of Lark, also those without an end: that takes no longer."""


def check_ends(grammar: str, special_names: Mapping[int, str], end_ids: Set[int]) -> None:
    """Raise `InvalidSamplingError` for a grammar that names a token of `end_ids`.

    Each of these ends a completion that is valid, and is no part of it.
    """
    names = {special_names[i] for i in end_ids if special_names.get(i, "").startswith("<")}
    ids = set(map(str, end_ids))
    of_tokens = [*map(re.escape, sorted(names)), r"<\[[0-9,-]*\]>"]
    for match in re.finditer("|".join([*of_tokens, NOT_BARE.pattern]), grammar):
        named = match[0]
        listed = named.startswith("<[") and set(named[2:-2].split(",")) <= ids
        if named in names or listed:
            raise _refused(
                "grammar",
                f"names {named}, which ends a completion wherever it is valid, and is no part of "
                "it",
            )


def _check_each(schema: Any, argument: str, depth: int, checked: list[dict[str, Any]]) -> bool:
    """Check each schema within, and append it to `checked`. Return true if any was rewritten."""
    if depth > MAX_DEPTH:
        raise _refused(argument, f"is nested more than {MAX_DEPTH} deep", MAX_DEPTH)
    if not isinstance(schema, dict):
        return False
    is_spelled = spelled(schema)
    for keyword in _MOVES:
        if keyword in schema and (depth or keyword not in ("$id", "id")):
            raise _refused(argument, f"has {keyword}, and only the whole schema may have $id")
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
        is_spelled |= _check_each(inner, argument, depth + 1, checked)
    checked.append(schema)
    return is_spelled


def _endless(schema: Any, argument: str) -> str | None:
    try:
        return endless_reference(schema, _within, partial(referred, schema))
    except ValueError as error:
        raise _refused(argument, str(error)) from None


def spelled_anew(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema, without keywords that have no effect."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    waiting: list[Any] = [copy]
    while waiting:
        if isinstance(one := waiting.pop(), dict):
            spelled(one)
            waiting += _within(one)
    return copy


def _move_bounds(schema: dict[str, Any], argument: str, has_one_of: bool) -> bool:
    """Move bounds inwards that the library can't keep. Return true if there was one."""
    try:
        has_moved = bounded(schema)
    except ValueError as error:
        raise _refused(argument, str(error), MAX_BOUND) from None
    if has_moved and has_one_of:
        raise _refused(argument, "has oneOf, and a bound of too many digits", MAX_BOUND)
    return has_moved


def _narrow(schema: dict[str, Any], argument: str, has_one_of: bool) -> bool:
    """Exclude from a schema's further names the names that it knows, written in another way.

    Also gives each required name a schema. Returns true if that was needed.
    """
    patterns, properties = schema.get("patternProperties", {}), schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        raise _refused(argument, "has properties or patternProperties that are no object")
    names = [*properties, *_list(schema, "required")]
    if patterns and any(map(_CONTROL.search, map(str, names))):
        raise _refused(argument, "has patternProperties beside names with control characters")
    others = schema.get("additionalProperties", True)
    if others is False or not (names or patterns):
        return False
    for name in map(str, _list(schema, "required")):
        properties.setdefault(name, others)
    schema["properties"] = properties
    if others in (True, {}) and not patterns:
        schema["patternProperties"] = {_PLAIN_NAME: True}
    elif has_one_of:
        raise _refused(
            argument,
            "has oneOf, and additionalProperties that aren't false beside names and patterns",
        )
    schema["additionalProperties"] = False
    return True


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _names(value: Any) -> Iterator[str]:
    """Yield all names in a schema, including those of its keywords and its data."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != _PLAIN_NAME:
                yield name
            if name == "required" and isinstance(inner, list):
                yield from map(str, inner)
            yield from _names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names(inner)


def _within(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword, form in _PLACES.items():
        value = schema.get(keyword)
        if form == "schema":
            yield from value if isinstance(value, list) else (value,)
        elif form == "list" and isinstance(value, list):
            yield from value
        elif form == "map" and isinstance(value, dict):
            yield from value.values()


class _Joined:
    """Numbers of patterns and formats that strings must match at once, by their places in the
    value.
    """

    def __init__(self, root: Any, argument: str, checked: list[dict[str, Any]]) -> None:
        self._root = root
        self._checked = set(map(id, checked))
        self._argument = argument
        self._num_places = self._num_schemas = 0
        self._known: dict[str, Counter[_Path]] = {}
        """Counts of the schemas that are referred to, by reference."""

    def of(self, schema: Any, refs: tuple[str, ...]) -> Counter[_Path]:
        """Return the patterns and formats of `schema` by place.

        `refs` are the references that led here.
        """
        counts: Counter[_Path] = Counter()
        if not isinstance(schema, dict):
            return counts
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise _refused(self._argument, "has more schemas within it", MAX_SCHEMAS)
        counts[()] = ("pattern" in schema) + ("format" in schema)
        for inner in _list(schema, "allOf"):
            counts.update(self.of(inner, refs))
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in refs:
            if ref not in self._known:
                if len(refs) == MAX_DEPTH:
                    raise _refused(
                        self._argument,
                        f"leads through more than {MAX_DEPTH} references",
                        MAX_DEPTH,
                    )
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
        """Return the schema that is referred to."""
        at = referred(self._root, ref)
        if not (isinstance(at, bool) or id(at) in self._checked):
            raise _refused(self._argument, f"refers to {ref[:100]}, which is no schema within it")
        return at


_INDEX = re.compile("0|[1-9][0-9]{0,8}")


def referred(root: Any, ref: str) -> Any:
    """Return what a reference leads to by `#/...`; None if that is nothing."""
    at = root
    start, *parts = unquote(ref).split("/")
    if start != "#":
        return None
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and _INDEX.fullmatch(name) and int(name) < len(at):
            at = at[int(name)]
        elif isinstance(at, dict) and name in at:
            at = at[name]
        else:
            return None
    return at


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of the parts of a value, each with its place."""
    for keyword in ("properties", "patternProperties"):
        value = schema.get(keyword)
        if isinstance(value, dict):
            for name, inner in value.items():
                yield "." + (name if keyword == "properties" else ""), inner
    yield ".", schema.get("additionalProperties")
    for keyword in ("items", "additionalItems", "prefixItems"):
        value = schema.get(keyword)
        for inner in value if isinstance(value, list) else (value,):
            yield "[]", inner


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _refused(argument: str, why: str, limit: object = None) -> InvalidSamplingError:
    most = "" if limit is None else f"; {limit} are taken at most"
    return InvalidSamplingError(
        f"{argument} must be one that can be kept: it {why}{most}", argument=argument, limit=limit
    )
