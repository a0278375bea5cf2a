"""Finds rules of a grammar, and schemas, that have no finite text.

    node: "(" node ")"                                {"properties": {"next": {"$ref": "#"}},
                                                       "required": ["next"]}

A completion that comes to one of these never ends, and the library doesn't look for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["endless_reference", "endless_rule"]

MAX_LOOKS = 200_000
"""Most schemas that are looked at, each time counted. They take some 300 ms of a thread."""
_MAX_PLACES = 64
"""Most places of a list that are looked at one by one."""
_OF_PARTS = frozenset(
    ["properties", "required", "additionalProperties", "patternProperties", "minProperties"]
) | {"items", "prefixItems", "additionalItems", "minItems"}
"""Keywords about the parts of a value."""
_ALL = frozenset(["null", "boolean", "number", "string", "array", "object"])
_NONE: frozenset[str] = frozenset()
_Target = Callable[[str], Any]
_Parts = Sequence[Mapping[str, Any]]


def endless_reference(
    root: Any, within: Callable[[dict[str, Any]], Iterator[Any]], target: _Target
) -> str | None:
    """Return the first reference to a schema whose values would all be within themselves.

    None: there is none. `within` gives the schemas in a schema, `target` the schema that a
    reference leads to. Raises `ValueError` for schemas that are too much to look at.
    """
    refs = list(dict.fromkeys(_references(root, within, target)))
    if not refs:
        return None
    looks = [0]
    least = _Types(_NONE, target, looks)
    ended = {ref: least.solved(target(ref)) for ref in refs}
    if all(ended.values()):
        return None
    most = _Types(_ALL, target, looks)
    return next((ref for ref in refs if not ended[ref] and most.solved(target(ref))), None)


def _references(
    root: Any, within: Callable[[dict[str, Any]], Iterator[Any]], target: _Target
) -> Iterator[str]:
    """Yield the references in a schema, and in those that they lead to.

    References in definitions alone are left out.
    """
    waiting, seen = [root], set[int]()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        named = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        waiting += within(named)
        if isinstance(ref := schema.get("$ref"), str):
            yield ref
            waiting.append(target(ref))


_DEFINITIONS = ("$defs", "definitions")


class _Types:
    """Types of the values of schemas: the fewest that agree with each other, or the most.

    Schemas that nothing is known about have the types `first`.
    """

    def __init__(self, first: frozenset[str], target: _Target, looks: list[int]) -> None:
        self._first = first
        self._target = target
        self._looks = looks
        self._known: dict[int, frozenset[str]] = {}
        self._users: dict[int, set[int]] = {}
        self._waiting: dict[int, Any] = {}
        """Schemas to look at, by their ids."""
        self._schemas: dict[int, Any] = {}
        self._at = 0
        """Id of the schema that is being looked at."""

    def solved(self, schema: Any) -> frozenset[str]:
        """Return the types of a schema, once all that it leads to was looked at."""
        self.of(schema)
        while self._waiting:
            self._at, at = self._waiting.popitem()
            types = self._ended([], [at])
            if types != self._known[self._at]:
                self._known[self._at] = types
                self._waiting |= {user: self._schemas[user] for user in self._users[self._at]}
        self._at = 0
        return self.of(schema)

    def of(self, schema: Any) -> frozenset[str]:
        """Return the types of a schema as far as they are known."""
        if not isinstance(schema, dict):
            return _NONE if schema is False else _ALL
        key = id(schema)
        if key not in self._known:
            self._known[key] = self._first
            self._users[key] = set()
            self._schemas[key] = self._waiting[key] = schema
        if self._at:
            self._users[key].add(self._at)
        return self._known[key]

    def _ended(self, outer: _Parts, schemas: Sequence[Any]) -> frozenset[str]:
        """Return the types of the values that all of `schemas` and `outer` take.

        Of `outer`, lists of alternatives are ignored.
        """
        new = self._joined(schemas)
        if new is None:
            return _NONE
        parts = [*outer, *new]
        types = _ALL
        for part in parts:
            types &= _named(part)
        for part in new:
            for keyword in ("anyOf", "oneOf"):
                if isinstance(either := part.get(keyword), list):
                    types &= _NONE.union(*(self._branch(parts, one) for one in either))
        if "object" in types and not self._has_object(parts):
            types -= {"object"}
        if "array" in types and not self._has_array(parts):
            types -= {"array"}
        return types

    def _branch(self, outer: _Parts, schema: Any) -> frozenset[str]:
        """Return the same as `_ended`, for one of several schemas.

        A schema that has nothing to do with `outer` is looked at alone.
        """
        new = self._joined([schema])
        if new is None:
            return _NONE
        has_parts = any(not _OF_PARTS.isdisjoint(part) for part in outer)
        known = set(map(id, outer))
        if has_parts and known.isdisjoint(map(id, new)):
            return self._ended(outer, [schema])
        return self.of(schema)

    def _joined(self, schemas: Sequence[Any]) -> list[dict[str, Any]] | None:
        """Return all schemas that a value must match; None if it can't match them."""
        found: dict[int, dict[str, Any]] = {}
        if all(self._join(schema, found, set()) for schema in schemas):
            return list(found.values())
        return None

    def _join(self, schema: Any, found: dict[int, dict[str, Any]], begun: set[int]) -> bool:
        """Add a schema, and all those beside it.

        False: the schema is false, or nothing but itself. `begun` are the schemas that led here.
        """
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) in begun:
            return bool(self._first)
        if id(schema) in found:
            return True
        self._looks[0] += 1
        if self._looks[0] > MAX_LOOKS:
            raise ValueError("leads to itself in too many ways")
        found[id(schema)] = schema
        beside = _list(schema.get("allOf"))
        if isinstance(ref := schema.get("$ref"), str):
            beside = [*beside, self._target(ref)]
        return all(self._join(one, found, begun | {id(schema)}) for one in beside)

    def _has_object(self, parts: _Parts) -> bool:
        required = {name for part in parts for name in map(str, _list(part.get("required")))}
        for part in parts:
            properties = _dict(part.get("properties"))
            others = part.get("additionalProperties", True)
            by_pattern = _dict(part.get("patternProperties"))
            if by_pattern:  # Any of the patterns may be about any name.
                others = True
            if not all(self.of(properties.get(name, others)) for name in required):
                return False
            least = part.get("minProperties", 0)
            if _is_number(least) and least > len(required):
                ways = [others, *by_pattern.values(), *properties.values()]
                if not any(map(self.of, ways)):
                    return False
        return True

    def _has_array(self, parts: _Parts) -> bool:
        least = max((n for part in parts if _is_number(n := part.get("minItems", 0))), default=0)
        for part in parts:
            items = part.get("items", True)
            if isinstance(items, list):
                first, others = items, part.get("additionalItems", True)
            else:
                first, others = _list(part.get("prefixItems")), items
            needed = first[: min(int(least), _MAX_PLACES)]
            if least > len(first):
                needed = [*needed, others]
            if not all(map(self.of, needed)):
                return False
        return True


def _named(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema names, and those of its values."""
    types = _ALL
    named = schema.get("type")
    if isinstance(named, str | list):
        names = [named] if isinstance(named, str) else [*map(str, named)]
        types &= {"number" if name == "integer" else name for name in names}
    if "const" in schema:
        types &= {_type_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        types &= {*map(_type_of, values)}
    return types


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "number"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def endless_rule(bodies: Mapping[str, Sequence[tuple[str, Any]]], start: str) -> str | None:
    """Return the first rule that `start` leads to and that has no finite text.

    Such a rule always has itself within; None: there is none. A body has the parts that a grammar
    in Lark is read into. They are "name" with a name, "times" with the least count, "open",
    "close", "maybe" and "either". Others are text.
    """
    users: dict[str, list[str]] = {name: [] for name in bodies}
    for name, body in bodies.items():
        for ref in dict.fromkeys(_names(body)):
            if ref in bodies:
                users[ref].append(name)
    ended: set[str] = set()
    waiting = list(bodies)
    while waiting:
        name = waiting.pop()
        if name not in ended and _ends(bodies[name], bodies.keys() - ended):
            ended.add(name)
            waiting += users[name]
    reached, waiting = dict.fromkeys([start]), [start]
    while waiting:
        new = {ref for ref in _names(bodies.get(waiting.pop(), ())) if ref not in reached}
        reached |= dict.fromkeys(new)
        waiting += new & bodies.keys()
    return next((name for name in bodies if name in reached and name not in ended), None)


def _names(body: Sequence[tuple[str, Any]]) -> Iterator[str]:
    return (value for kind, value in body if kind == "name")


def _ends(body: Sequence[tuple[str, Any]], endless: Any) -> bool:
    """Return true if a rule has a finite text, while the rules `endless` have none."""
    outer: list[tuple[bool, bool]] = []
    either, before, last = False, True, True
    for kind, value in body:
        match kind:
            case "times" if value == 0:
                last = True
            case "times":
                pass
            case "open":
                outer.append((either, before and last))
                either, before, last = False, True, True
            case "close" | "maybe":
                ends = either or (before and last) or kind == "maybe"
                if outer:
                    (either, before), last = outer.pop(), ends
            case "either":
                either = either or (before and last)
                before, last = True, True
            case _:
                before, last = before and last, kind != "name" or value not in endless
    return either or (before and last)
