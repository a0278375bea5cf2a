r"""Translates GBNF, the EBNF of llama.cpp, XGrammar and SGLang, to llguidance's form of Lark.

    root ::= "[" item ("," item)* "]"        start: "[" item ("," item)* "]"
    item ::= [0-9]+ | root                   item: T0 | start

A rule that doesn't lead to itself is a terminal, and so are neighbours in a sequence that have no
such rule: terminals are expressions. A terminal that would take text of what follows it is written
in smaller parts, down to characters. So the grammar is matched exactly. In a grammar that is too
large to find that out, the longest terminal counts.

White space, including line ends, means nothing between parts: a rule ends where a name and `::=`
begin the next.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from aioserve.grammars.endings import endless_rule
from aioserve.grammars.lexing import LAST_CHAR, Looks, Node, Ranges, TooMuchError, greedy
from aioserve.grammars.schema import MAX_RULES

__all__ = ["is_gbnf", "lark_of"]

_PART = re.compile(
    r"""
    (?P<space> (?: \s | \#[^\n]*+ )++ )
  | (?P<rule> (?P<name> [A-Za-z_][\w-]* ) (?: \s | \#[^\n]*+ )*+ ::= )
  | (?P<ref> [A-Za-z_][\w-]* )
  | (?P<text> " (?: [^"\\\n] | \\. )* " )
  | (?P<class> \[ (?: [^\]\\\n] | \\. )* \] )
  | (?P<times> \{ \s* \d+ \s* (?: , \s* \d* \s* )? \} )
  | (?P<mark> [()|*+?.] )
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|([^\\])")
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in "\"'\\[]-^/"}
MAX_DEPTH = 64
"""Most brackets within each other."""
MAX_TIMES = 8
"""Most repeats in a row: each repeats what the one before it does."""


def is_gbnf(grammar: str) -> bool:
    """Return true if a grammar is written in GBNF: Lark has no rule like its first."""
    try:
        return next((part.group("rule") is not None for part in _parts(grammar)), False)
    except ValueError:
        return False


def lark_of(grammar: str) -> str:
    """Return the grammar in Lark. Raises `ValueError` for text that isn't GBNF."""
    return _Writer(_Reader(grammar).rules()).lark()


def _parts(grammar: str) -> Iterator[re.Match[str]]:
    """Yield all parts except white space. Raises `ValueError` for text that is no part."""
    at = 0
    while at < len(grammar):
        if (part := _PART.match(grammar, at)) is None:
            raise ValueError(f"no part of GBNF begins with {grammar[at : at + 20]!r}")
        at = part.end()
        if part.group("space") is None:
            yield part


class _Reader:
    """Reads rules.

    Keeps no part that was read: with many objects, the garbage collector would stop the process.
    """

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._parts = _parts(grammar)
        self._part = next(self._parts, None)
        """Next part."""

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while (part := self._part) is not None:
            name = part.group("name")
            if part.group("rule") is None or name in found:
                raise self._unread("a rule of another name")
            if len(found) == MAX_RULES:
                raise ValueError(f"it has more than {MAX_RULES} rules")
            self._step()
            found[name] = self._either(0)
        return found

    def _step(self) -> None:
        self._part = next(self._parts, None)

    def _mark(self) -> str | None:
        return None if self._part is None else self._part.group("mark")

    def _either(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ValueError(f"brackets are nested more than {MAX_DEPTH} deep")
        sequences = [self._sequence(depth)]
        while self._mark() == "|":
            self._step()
            sequences.append(self._sequence(depth))
        return sequences[0] if len(sequences) == 1 else Node("either", inner=sequences)

    def _sequence(self, depth: int) -> Node:
        nodes: list[Node] = []
        while (part := self._part) is not None:
            if part.group("rule") is not None or part.group("mark") in ("|", ")"):
                break
            node = self._one(part, depth)
            num_times = 0
            while (part := self._part) is not None:
                if part.group("mark") in ("*", "+", "?"):
                    times = part[0]
                elif part.group("times") is not None:
                    times = re.sub(r"\s", "", part[0])
                else:
                    break
                self._step()
                num_times += 1
                if num_times > MAX_TIMES:
                    raise ValueError(f"more than {MAX_TIMES} repeats stand in a row")
                node = Node("times", times, [node], ((_least(times), 0),))
            nodes.append(node)
        return nodes[0] if len(nodes) == 1 else Node("sequence", inner=nodes)

    def _one(self, part: re.Match[str], depth: int) -> Node:
        if part.group("mark") not in (None, ".", "(") or part.group("times") is not None:
            raise self._unread("a rule's name, a text, a class or a bracket")
        self._step()
        if part.group("ref") is not None:
            return Node("ref", part[0])
        if part.group("text") is not None:
            return Node("text", "".join(_chars(part[0][1:-1])))
        if part.group("class") is not None:
            return _class(part[0][1:-1])
        if part[0] == ".":
            return Node("class", "/(?s:.)/", ranges=((0, LAST_CHAR),))
        node = self._either(depth + 1)
        if self._mark() != ")":
            raise self._unread("a closing bracket")
        self._step()
        return node

    def _unread(self, wanted: str) -> ValueError:
        part = self._part
        got = "the end" if part is None else repr(self._grammar[part.start() :][:20])
        return ValueError(f"{wanted} was expected at {got}")


def _chars(written: str) -> Iterator[str]:
    """Yield the characters of a text or a class, with escapes read."""
    for escape in _ESCAPE.finditer(written):
        two, four, eight, one, char = escape.groups()
        if char is not None:
            yield char
        elif one is not None:
            if one not in _PLAIN_ESCAPES:
                raise ValueError(f"no escape of GBNF is {escape[0]!r}")
            yield _PLAIN_ESCAPES[one]
        else:
            code = int(two or four or eight, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise ValueError(f"no character is {escape[0]!r}")
            yield chr(code)


def _least(times: str) -> int:
    """Return the least number of a repeat."""
    return int(times.strip("{}").partition(",")[0]) if times[0] == "{" else int(times == "+")


def _class(written: str) -> Node:
    """Return a class of characters."""
    negated = written.startswith("^")
    pieces = [match[0] for match in _ESCAPE.finditer(written[negated:])]
    if not pieces:
        raise ValueError("a class of characters must not be empty")
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(pieces):
        low = high = ord(next(_chars(pieces[at])))
        at += 1
        if at + 1 < len(pieces) and pieces[at] == "-":
            high = ord(next(_chars(pieces[at + 1])))
            at += 2
        if high < low:
            raise ValueError(f"a range of [{written}] ends before it begins")
        ranges.append((low, high))
    inner = "".join([rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in ranges])
    taken = _others(ranges) if negated else tuple(ranges)
    return Node("class", f"/[{'^' * negated}{inner}]/", ranges=taken)


def _others(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return all code points except these."""
    found: list[tuple[int, int]] = []
    start = 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return (*found, (start, LAST_CHAR)) if start <= LAST_CHAR else tuple(found)


class _Writer:
    """Writes rules that were read."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        if "root" not in rules:
            raise ValueError("GBNF must have a rule of the name root")
        self._rules = rules
        self._refs = {name: set(_refs(node)) for name, node in rules.items()}
        for name in set().union(*self._refs.values()):
            if name not in rules:
                raise ValueError(f"no rule has the name {name[:99]!r}")
        if endless := endless_rule({name: list(_parts_of(rules[name])) for name in rules}, "root"):
            raise ValueError(
                f"no text of the rule {endless[:99]!r} ends: it always has itself within"
            )
        recursive = {name for name in rules if name in self._reached(name)}
        names = {name for name in rules if name in recursive or recursive & self._reached(name)}
        self._trees = {name: self._tree(rules[name], names) for name in rules if name in names}
        """Rules that are no terminals, with terminals as leaves."""
        if self._trees:
            self._split()
        self._names = {
            name: f"rule{number}" if name in self._trees else f"RULE{number}"
            for number, name in enumerate(rules)
        }
        self._terminals: list[str] = []

    def lark(self) -> str:
        lines = [f"start: {self._names['root']}"]
        for name, node in self._rules.items():
            tree = self._trees.get(name)
            written = self._text(node) if tree is None else self._rule(tree)
            lines.append(f"{self._names[name]}: {written}")
        return "\n".join([*lines, *self._terminals]) + "\n"

    def _reached(self, name: str) -> set[str]:
        """Return the names of all rules that a rule leads to."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            new = self._refs[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def _tree(self, node: Node, names: Set[str]) -> Node:
        """Return a node in which all that has none of the rules `names` is a terminal."""
        if names.isdisjoint(_refs(node)):
            return Node("terminal", inner=[node])
        if node.kind == "ref":
            return node
        inner: list[Node] = []
        for one in node.inner:
            tree = self._tree(one, names)
            kinds = [node.kind, tree.kind, *(each.kind for each in inner[-1:])]
            if kinds == ["sequence", "terminal", "terminal"]:
                tree = _joined(inner.pop(), tree)
            inner.append(tree)
        return Node(node.kind, node.value, inner, node.ranges)

    def _split(self) -> None:
        """Write terminals that would take text of others in smaller parts."""
        looks, num_parts = Looks(), 0
        with contextlib.suppress(TooMuchError):
            while taking := greedy(self._trees, self._rules, "root", looks):
                for terminal in taking:
                    num_parts += self._split_one(terminal)
                if num_parts > MAX_RULES:
                    raise ValueError(f"it must be read in more than {MAX_RULES} parts")

    def _split_one(self, terminal: Node) -> int:
        """Write a terminal in smaller parts; return their number."""
        (node,) = terminal.inner
        if node.kind == "ref":
            terminal.inner = [self._rules[node.value]]
            return 1
        if node.kind == "text":
            node = Node("sequence", inner=[Node("text", char) for char in node.value])
        terminal.kind, terminal.value, terminal.ranges = node.kind, node.value, node.ranges
        terminal.inner = [Node("terminal", inner=[one]) for one in node.inner]
        return len(terminal.inner)

    def _text(self, node: Node) -> str:
        """Return a node of any kind, written in place."""
        match node.kind:
            case "either":
                return f"({' | '.join(map(self._text, node.inner))})"
            case "sequence":
                return _sequence(list(map(self._text, node.inner)))
            case "times":
                inner = self._text(node.inner[0])
                if node.inner[0].kind == "times":
                    inner = f"({inner})"
                return f"{inner}{node.value}"
            case "ref":
                return self._names[node.value]
            case "text":
                return json.dumps(node.value)
            case _:
                return node.value

    def _rule(self, node: Node) -> str:
        """Return a node of a rule. Parts without a rule become terminals."""
        match node.kind:
            case "terminal":
                (inner,) = node.inner
                if inner.kind == "sequence" and not inner.inner:
                    return '""'
                self._terminals.append(f"TEXT{len(self._terminals)}: {self._text(inner)}")
                return self._terminals[-1].partition(":")[0]
            case "either":
                return f"({' | '.join(map(self._rule, node.inner))})"
            case "times":
                return f"({self._rule(node.inner[0])}){node.value}"
            case "sequence":
                return _sequence(list(map(self._rule, node.inner)))
            case _:
                return self._names[node.value]


def _joined(first: Node, second: Node) -> Node:
    """Return two terminals as one."""
    parts = [
        one
        for each in (first.inner[0], second.inner[0])
        for one in (each.inner if each.kind == "sequence" else [each])
    ]
    return Node("terminal", inner=[Node("sequence", inner=parts)])


def _parts_of(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield a node as `endless_rule` reads it."""
    if node.kind == "ref":
        yield "name", node.value
    if node.kind not in ("either", "sequence", "times"):
        return
    yield "open", None
    for index, one in enumerate(node.inner):
        if index and node.kind == "either":
            yield "either", None
        yield from _parts_of(one)
    yield "close", None
    if node.kind == "times":
        yield "times", node.ranges[0][0]


def _sequence(parts: Sequence[str]) -> str:
    if not parts:
        return '""'
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"


def _refs(node: Node) -> Iterator[str]:
    if node.kind == "ref":
        yield node.value
    for inner in node.inner:
        yield from _refs(inner)
