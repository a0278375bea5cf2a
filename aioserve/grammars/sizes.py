r"""Bounds the texts that a grammar asks for, before llguidance looks ahead in it.

If a grammar leaves one way to go on, llguidance follows it to its end at once, and keeps each byte.
Counted repeats multiply: `((a{1000}){1000}){1000}` has a thousand million bytes, and so has `A: B
B`, `B: C C`, thirty times. Nothing in the library ends that. So

- a terminal, which is read as one, has at most `MAX_TERMINAL_BYTES`, as more states of its lexer
  end a completion in any case,
- and a grammar that could force more than `MAX_FORCED_BYTES` in a row is not looked ahead in.

The size of an expression is at least the length of what it can force. The size of a concatenation
is the sum of its parts' sizes, and that of alternatives the largest. A repeat counts as often as it
must come, but at least once. Expressions that are joined or excluded count as if they followed each
other. The library finds out, within a bound, if they leave any text.

A grammar whose rules lead back to themselves has no size. It forces no more than the shortest text
with which a rule can end, and those of the rules around it. A completion has begun each of these.
So such a grammar is looked ahead in if its rules have short texts, and short terminals, of which
many may be around.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from aioserve.errors import InvalidSamplingError
from aioserve.grammars.endings import endless_rule
from aioserve.grammars.schema import NOT_BARE, referred

__all__ = ["bounded_source", "expression_size", "of_lark"]

MAX_TERMINAL_BYTES = 50_000
MAX_FORCED_BYTES = 200_000
"""Most bytes that are looked ahead: some 100 ms, in which no other thread runs."""
MAX_RECURSIVE_BYTES = 80
"""Longest terminal of a grammar whose rules lead to themselves and that is looked ahead in."""
MAX_ROUNDS = 32
MAX_LOOKS = 300_000
"""Most parts that are looked at for the shortest texts; they take some 200 ms of a thread."""
MAX_ALTERNATIVES = 4000
"""Most alternatives of all rules.

The library compares each with each, and no other thread runs meanwhile: these take some 50 ms.
Alternatives of terminals cost nothing.
"""
_MAX_SIZE = 10**12
"""Sizes from here on are not told apart."""

_NO_FORCING = '%llguidance {"no_forcing": true}'


def bounded_source(source: str, argument: str) -> tuple[str, int]:
    """Return a grammar as llguidance takes it, and the bytes of its largest terminal.

    A grammar that forces too much is not looked ahead in. Raises `InvalidSamplingError` for a
    terminal that is too large; `argument` names the parameter that it came in.
    """
    grammars = json.loads(source)["grammars"]
    sizes: list[_Size] = []
    for grammar in grammars:
        lark, schema = grammar.get("lark_grammar"), grammar.get("json_schema")
        sizes.append(_lark_size(lark) if lark is not None else _schema_size(schema))
    if (largest := max(size.terminal for size in sizes)) > MAX_TERMINAL_BYTES:
        at_least = "" if largest < _MAX_SIZE else "at least "
        raise InvalidSamplingError(
            f"{argument} must be one that can be kept: it asks for {at_least}{largest} bytes in "
            f"one piece; {MAX_TERMINAL_BYTES} are taken at most",
            argument=argument,
            value=largest,
            limit=MAX_TERMINAL_BYTES,
        )
    if max(size.forced for size in sizes) <= MAX_FORCED_BYTES:
        return source, largest
    for grammar in grammars:
        lark, schema = grammar.get("lark_grammar"), grammar.get("json_schema")
        grammar["json_schema"] = None
        grammar["lark_grammar"] = (
            f"start: %json {json.dumps(schema)}\n{_NO_FORCING}\n"
            if lark is None
            else f"{lark}\n{_NO_FORCING}\n"
        )
    return json.dumps({"grammars": grammars}), largest


def of_lark(text: str) -> str:
    """Return a grammar in Lark as llguidance takes it.

    Text alone that begins with a brace would be taken for a grammar in llguidance's own JSON.
    """
    return json.dumps({"grammars": [{"lark_grammar": text}]})


class _Size:
    """Number of bytes that a grammar, or a part of one, may force."""

    def __init__(self, forced: int, longest: int = 0, terminal: int = 0) -> None:
        self.forced = min(forced, _MAX_SIZE)
        self.longest = longest
        """Most bytes that one terminal of it forces."""
        self.terminal = min(max(terminal, longest), _MAX_SIZE)
        """Size of its largest terminal, of which a part may not be forced."""


class _Total:
    """Adds up an expression while it is read: brackets open and close, parts follow each other.

    With `least` it is the shortest text: the smallest alternative counts, and optional parts don't.
    """

    def __init__(self, *, least: bool = False) -> None:
        self.largest = 0
        """Largest part, including optional ones."""
        self._least = least
        self._outer: list[tuple[int | None, int]] = []
        self._most: int | None = None
        """Size of the largest alternative before this one, or of the smallest."""
        self._sum = 0
        """Size of this alternative without its last part."""
        self._last = 0

    def add(self, size: int) -> None:
        self._sum += self._last
        self._last = size

    def times(self, count: int) -> None:
        """Repeat the last part."""
        self.largest = max(self.largest, min(self._last * max(count, 1), _MAX_SIZE))
        self._last = min(self._last * max(count, not self._least), _MAX_SIZE)

    def open(self) -> None:
        self._outer.append((self._most, self._sum + self._last))
        self._most = None
        self._sum = self._last = 0

    def either(self) -> None:
        """Begin another alternative."""
        size = min(self._sum + self._last, _MAX_SIZE)
        if self._most is None:
            self._most = size
        else:
            self._most = (min if self._least else max)(self._most, size)
        self.largest = max(self.largest, size)
        self._sum = self._last = 0

    def close(self) -> None:
        if self._outer:
            size = self._ended()
            self._most, self._sum = self._outer.pop()
            self._last = size

    def all(self) -> int:
        while self._outer:
            self.close()
        return self._ended()

    def _ended(self) -> int:
        self.either()
        return self._most or 0


_EXPRESSION_PART = re.compile(
    r"""
    (?P<escape> \\ (?: [pPxuU]\{[^}]*\} | . ) )
  | (?P<flags> \(\? [A-Za-z-]+ \) )
  | (?P<open> \( (?: \? (?: P?<[A-Za-z_][^>]*> | [A-Za-z-]*: ) )? )
  | (?P<mark> [)|] )
  | \{ \s* (?P<count> [0-9]+ ) \s* (?: , \s* [0-9]* \s* )? \}
  | (?P<class> \[ )
  | (?P<char> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_CLASS_PART = re.compile(r"\\.|\[\^?\]?|\]|[^\\\[\]]+", re.DOTALL)
_SPACED = re.compile(r"\(\?[A-Za-z]*x")
"""Flags that allow white space and comments anywhere, even in numbers."""


def expression_size(expression: str) -> int:
    """Return the size of a regular expression in bytes: any text that it forces is no longer."""
    total = _Total()
    at = 0
    while (part := _EXPRESSION_PART.match(expression, at)) is not None:
        at = part.end()
        if _SPACED.match(part[0]) and "{" in expression:
            return _MAX_SIZE
        match part.lastgroup:
            case "flags":
                pass
            case "open":
                total.open()
            case "mark":
                (total.close if part[0] == ")" else total.either)()
            case "count":
                total.times(_count(part["count"]))
            case "class":
                at = _end_of_class(expression, part.start())
                total.add(1)
            case "char" if part[0] in "*+?":
                pass
            case "escape":
                total.add(4 if part[0][1] in "xuU" else 1)
            case _:
                total.add(len(part[0].encode(errors="replace")))
    return total.all()


def _end_of_class(expression: str, at: int) -> int:
    """Return the end of a class that begins at `at`, and may have others within."""
    depth = 0
    while (part := _CLASS_PART.match(expression, at)) is not None:
        at = part.end()
        depth += (part[0][0] == "[") - (part[0] == "]")
        if depth == 0:
            break
    return at


def _count(digits: str) -> int:
    return int(digits) if len(digits) < 10 else _MAX_SIZE


_LARK_PART = re.compile(
    rf"""
    (?P<json> %(?:json|regex|llguidance)\b )
  | (?P<name> !?[_?]?[A-Za-z][A-Za-z0-9_-]* )
  | (?P<quoted> {NOT_BARE.pattern.replace("#", "[#]")} )
  | (?P<token> <[^<>\s]+> )
  | [{{~] [ \t]* \+? (?P<count> [0-9]+ )
  | (?P<line> \r?\n )
  | (?P<mark> [:()|*?\[\]] )
  | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_FLAGS = re.compile(r"[imslux]+")
_Part = tuple[str, Any]
"""Part of Lark: "size" of a text or an expression, "name", "schema", "times" or a kind of mark."""
_EITHER: _Part = ("either", None)
_MARKS: Mapping[str, _Part] = {
    "(": ("open", None),
    "[": ("open", None),
    ")": ("close", None),
    "]": ("maybe", None),
    "*": ("times", 0),
    "?": ("times", 0),
    "|": _EITHER,
    ":": ("colon", None),
}


def _lark_size(text: str) -> _Size:
    """Return the size of a grammar in Lark. Raises `ValueError` for text that can't be read."""
    bodies: dict[str, list[_Part]] = {}
    for name, parts in _definitions(text):
        bodies[name] = [*bodies[name], _EITHER, *parts] if name in bodies else parts
    rules = [body for name, body in bodies.items() if not _is_terminal(name)]
    if (number := sum(body.count(_EITHER) + 1 for body in rules)) > MAX_ALTERNATIVES:
        raise ValueError(
            f"its rules have {number} alternatives; {MAX_ALTERNATIVES} are taken at most, and more "
            "in a terminal"
        )
    sizes: dict[str, int] = {}
    refs = {
        name: {ref for ref in _of("name", body) if ref in bodies} for name, body in bodies.items()
    }
    order = TopologicalSorter(refs)
    with contextlib.suppress(CycleError):  # what leads to no cycle comes out of it anyway
        order.prepare()
    while ready := order.get_ready():
        for name in ready:
            sizes[name] = _body_size(bodies[name], sizes)
            order.done(name)
    terminals = [size for name, size in sizes.items() if _is_terminal(name)]
    for name, body in bodies.items():
        if name not in sizes and _is_terminal(name):
            raise ValueError(f"the terminal {name[:99]!r} leads to itself")
        terminals += _of("size", body)
    schemas = [size for body in bodies.values() for size in _of("schema", body)]
    longest = max([0, *terminals, *[size.longest for size in schemas]])
    forced = max(sizes.values(), default=0)
    if len(sizes) < len(bodies):
        if endless := endless_rule(bodies, "start"):
            raise ValueError(
                f"no text of the rule {endless[:99]!r} ends: it always has itself within"
            )
        forced = _shortest(bodies) if longest <= MAX_RECURSIVE_BYTES else _MAX_SIZE
    return _Size(forced, longest, max([0, *[size.terminal for size in schemas]]))


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _of(kind: str, parts: Sequence[_Part]) -> Iterator[Any]:
    return (value for of_kind, value in parts if of_kind == kind)


def _body_size(parts: Sequence[_Part], sizes: Mapping[str, int]) -> int:
    return _body_total(parts, sizes, _Total()).all()


def _body_total(parts: Sequence[_Part], sizes: Mapping[str, int], total: _Total) -> _Total:
    for kind, value in parts:
        match kind:
            case "size":
                total.add(value)
            case "name":
                total.add(sizes.get(value, 1))
            case "schema":
                total.add(value.forced)
            case "times":
                total.times(value)
            case "open":
                total.open()
            case "close" | "maybe":
                total.close()
                total.times(kind == "close")
            case _:
                total.either()
    return total


def _shortest(bodies: Mapping[str, Sequence[_Part]]) -> int:
    """Return the largest of the shortest texts of each rule, and of each part of one.

    Rules without any text, and those that take many rounds to find out, count as endless.
    """
    known: dict[str, int] = {}
    names = list(bodies)
    largest = dict.fromkeys(names, 0)
    rounds = min(MAX_ROUNDS, MAX_LOOKS // sum(map(len, bodies.values())))
    for _ in range(rounds):
        before = dict(known)
        names.reverse()
        for name in names:
            sizes = {
                ref: known.get(ref, _MAX_SIZE) for ref in _of("name", bodies[name]) if ref in bodies
            }
            total = _body_total(bodies[name], sizes, _Total(least=True))
            known[name] = total.all()
            largest[name] = total.largest
        if known == before:
            return max(largest.values())
    return _MAX_SIZE


def _definitions(text: str) -> Iterator[tuple[str, list[_Part]]]:
    """Yield the names that are defined and their definitions, with heads.

    Statements have no name.
    """
    name, parts = "", []
    is_start = True
    for kind, value in _lark_parts(text):
        if kind == "line":
            is_start = True
            continue
        if is_start and (kind, value) != _EITHER:
            yield name, parts
            name, parts = "", []
        if kind == "colon":
            name = next(_of("name", parts), "")
            parts = [part for part in parts if part[0] in ("size", "schema")]
        else:
            parts.append((kind, value))
        is_start = False
    yield name, parts


def _lark_parts(text: str) -> Iterator[_Part]:
    at = 0
    while (part := _LARK_PART.match(text, at)) is not None:
        at = part.end()
        match part.lastgroup:
            case "json":
                start = re.compile(r"\s*").match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
                value, at = json.JSONDecoder().raw_decode(text, start)
                yield "schema", _schema_size(value)
            case "name":
                yield "name", part[0].lstrip("!?")
            case "quoted" if part[0][0] == '"':
                yield "size", _text_size(part[0])
            case "quoted" if part[0][0] == "/" and part[0][:2] != "//":
                flags = _FLAGS.match(text, at)
                at = at if flags is None else flags.end()
                spaced = "(?x)" if flags is not None and "x" in flags[0] else ""
                yield "size", expression_size(spaced + part[0][1:-1])
            case "count":
                yield "times", _count(part["count"])
            case "line":
                yield "line", None
            case "mark":
                yield _MARKS[part[0]]
            case _:
                pass


def _text_size(quoted: str) -> int:
    try:
        return len(json.loads(quoted).encode(errors="replace"))
    except ValueError:  # the library gives the reason
        return len(quoted.encode(errors="replace"))


def _schema_size(schema: Any) -> _Size:
    """Return the size of a schema of JSON: of its patterns, and of all texts in it."""
    waiting = [schema]
    longest = least = patterns = 0
    is_repeated = False
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            longest = max(longest, len(json.dumps(value)))
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            texts = [value["pattern"]] if isinstance(value.get("pattern"), str) else []
            if isinstance(by_pattern := value.get("patternProperties"), dict):
                texts += by_pattern
            sizes = [expression_size(text) for text in texts]
            longest = max([longest, *sizes])
            patterns += sum(sizes)
            least = max([least, *_numbers(value, "minLength")])
            is_repeated |= "$ref" in value or any(n > 1 for n in _numbers(value, "minItems"))
            for name, inner in value.items():
                if name not in _NOTES and not (name == "pattern" and isinstance(inner, str)):
                    waiting += (name, inner)
    forced = len(json.dumps(schema)) + patterns
    if is_repeated:
        forced = _shortest_json(schema) if longest <= MAX_RECURSIVE_BYTES else _MAX_SIZE
    return _Size(forced, longest, least)


def _shortest_json(root: Any) -> int:
    """Return the same as `_shortest`, for a schema and those that it refers to."""
    known: dict[str, int] = {}
    sizes: list[int] = []
    num_looks = 0

    def within(schemas: Any) -> list[int]:
        values = schemas.values() if isinstance(schemas, dict) else schemas
        return [shortest(each) for each in values] if isinstance(schemas, dict | list) else []

    def shortest(schema: Any) -> int:
        nonlocal num_looks
        if not isinstance(schema, dict):
            return 4
        num_looks += 1
        if num_looks > MAX_LOOKS:
            return _MAX_SIZE
        size = sum([2, *_numbers(schema, "minLength"), *within(schema.get("allOf"))])
        if isinstance(ref := schema.get("$ref"), str):
            size += known.setdefault(ref, _MAX_SIZE)
        if isinstance(pattern := schema.get("pattern"), str):
            size += expression_size(pattern)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            num_looks += len(values)
            size += min(len(json.dumps(value)) for value in values)
        for keyword in ("anyOf", "oneOf"):
            size += min(within(schema.get(keyword)), default=0)
        others = max(within([schema.get("additionalProperties")]))
        others = max([others, *within(schema.get("patternProperties"))])
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            lengths = dict(zip(properties, within(properties), strict=True))
        else:
            lengths = {}
        for name in map(str, required) if isinstance(required, list) else ():
            size += len(json.dumps(name)) + 4 + lengths.get(name, others)
        items = max(within([schema.get("items"), schema.get("additionalItems")]))
        size += sum(_numbers(schema, "minItems")) * (items + 2)
        size = min(size + sum(within(schema.get("prefixItems"))), _MAX_SIZE)
        sizes.append(size)
        return size

    for _ in range(MAX_ROUNDS):
        before = dict(known)
        sizes.clear()
        shortest(root)
        for ref in reversed(list(known)):
            known[ref] = shortest(referred(root, ref))
        if num_looks > MAX_LOOKS:
            break
        if known == before:
            return max(sizes, default=0)
    return _MAX_SIZE


_NOTES = frozenset(["title", "description", "default", "examples", "$comment"])
"""Keywords whose text is nowhere in the values of a schema."""


def _numbers(schema: Mapping[str, Any], keyword: str) -> list[int]:
    value = schema.get(keyword)
    return [int(min(value, _MAX_SIZE))] if isinstance(value, int | float) else []
