r"""From GBNF, the EBNF of llama.cpp, XGrammar and SGLang, to llguidance's form of Lark.

    root ::= "[" item ("," item)* "]"        start: "[" item ("," item)* "]"
    item ::= [0-9]+ | root                   item: T0 | start

A rule that doesn't lead to itself is a terminal, and so are neighbours in a sequence that have no
such rule: terminals are expressions, which are matched exactly. What is drawn matches the grammar
in any case; but where two terminals could follow each other in several ways, the longest counts.

White space, new lines among it, means nothing between parts: a rule ends where a name and `::=`
begin the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
"""Depth of brackets."""
MAX_TIMES = 8
"""Most repeats in a row: each repeats what the one before it does."""


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is written in GBNF: Lark has no rule like its first."""
    try:
        return next((part.group("rule") is not None for part in _parts(grammar)), False)
    except ValueError:
        return False


def lark_of(grammar: str) -> str:
    """The grammar in Lark. Raises `ValueError` saying what isn't GBNF."""
    return _Writer(_Reader(grammar).rules()).lark()


def _parts(grammar: str) -> Iterator[re.Match[str]]:
    """All but white space. Raises `ValueError` for what is no part."""
    at = 0
    while at < len(grammar):
        if (part := _PART.match(grammar, at)) is None:
            raise ValueError(f"no part of GBNF begins with {grammar[at : at + 20]!r}")
        at = part.end()
        if part.group("space") is None:
            yield part


@dataclass(slots=True)
class _Node:
    kind: str
    """ "either", "sequence" and "times" have `inner`; "ref" and "atom" a `value`: a name, and an
    expression of Lark."""
    value: str = ""
    inner: Sequence[_Node] = ()


class _Reader:
    """Reads rules. Keeps no part that was read: many objects would have the collector stop the
    process."""

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._parts = _parts(grammar)
        self._part = next(self._parts, None)
        """The part that comes next."""

    def rules(self) -> dict[str, _Node]:
        found: dict[str, _Node] = {}
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

    def _either(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise ValueError(f"brackets are nested more than {MAX_DEPTH} deep")
        sequences = [self._sequence(depth)]
        while self._mark() == "|":
            self._step()
            sequences.append(self._sequence(depth))
        return sequences[0] if len(sequences) == 1 else _Node("either", inner=sequences)

    def _sequence(self, depth: int) -> _Node:
        nodes: list[_Node] = []
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
                node = _Node("times", times, [node])
            nodes.append(node)
        return nodes[0] if len(nodes) == 1 else _Node("sequence", inner=nodes)

    def _one(self, part: re.Match[str], depth: int) -> _Node:
        if part.group("mark") not in (None, ".", "(") or part.group("times") is not None:
            raise self._unread("a rule's name, a text, a class or a bracket")
        self._step()
        if part.group("ref") is not None:
            return _Node("ref", part[0])
        if part.group("text") is not None:
            return _Node("atom", json.dumps("".join(_chars(part[0][1:-1]))))
        if part.group("class") is not None:
            return _Node("atom", _class(part[0][1:-1]))
        if part[0] == ".":
            return _Node("atom", "/(?s:.)/")
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
    """Characters of a text or a class, escapes read."""
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


def _class(written: str) -> str:
    """A class of characters, as an expression."""
    negated = written.startswith("^")
    pieces = [match[0] for match in _ESCAPE.finditer(written[negated:])]
    if not pieces:
        raise ValueError("a class of characters must not be empty")
    ranges: list[str] = []
    at = 0
    while at < len(pieces):
        low = high = ord(next(_chars(pieces[at])))
        at += 1
        if at + 1 < len(pieces) and pieces[at] == "-":
            high = ord(next(_chars(pieces[at + 1])))
            at += 2
        if high < low:
            raise ValueError(f"a range of [{written}] ends before it begins")
        ranges.append(rf"\x{{{low:x}}}-\x{{{high:x}}}")
    return f"/[{'^' * negated}{''.join(ranges)}]/"


class _Writer:
    """Writes rules that were read."""

    def __init__(self, rules: Mapping[str, _Node]) -> None:
        if "root" not in rules:
            raise ValueError("GBNF must have a rule of the name root")
        self._rules = rules
        self._refs = {name: set(_refs(node)) for name, node in rules.items()}
        for name in set().union(*self._refs.values()):
            if name not in rules:
                raise ValueError(f"no rule has the name {name[:99]!r}")
        recursive = {name for name in rules if name in self._reached(name)}
        self._rule_names = {
            name for name in rules if name in recursive or recursive & self._reached(name)
        }
        numbers = {name: number for number, name in enumerate(rules)}
        self._names = {
            name: f"rule{number}" if name in self._rule_names else f"RULE{number}"
            for name, number in numbers.items()
        }
        self._terminals: list[str] = []

    def lark(self) -> str:
        lines = [f"start: {self._names['root']}"]
        for name, node in self._rules.items():
            is_rule = name in self._rule_names
            lines.append(
                f"{self._names[name]}: {self._rule(node) if is_rule else self._text(node)}"
            )
        return "\n".join([*lines, *self._terminals]) + "\n"

    def _reached(self, name: str) -> set[str]:
        """Names of all rules that a rule leads to."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            new = self._refs[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def _is_terminal(self, node: _Node) -> bool:
        return self._rule_names.isdisjoint(_refs(node))

    def _text(self, node: _Node) -> str:
        """A node, written where it is, of whatever it has."""
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
            case _:
                return node.value

    def _rule(self, node: _Node) -> str:
        """A node of a rule, in which what has no rule is a terminal of its own."""
        if self._is_terminal(node):
            if node.kind == "sequence" and not node.inner:
                return '""'
            self._terminals.append(f"TEXT{len(self._terminals)}: {self._text(node)}")
            return self._terminals[-1].partition(":")[0]
        match node.kind:
            case "either":
                return f"({' | '.join(map(self._rule, node.inner))})"
            case "times":
                return f"({self._rule(node.inner[0])}){node.value}"
            case "sequence":
                return _sequence(list(map(self._rule, self._joined(node.inner))))
            case _:
                return self._text(node)

    def _joined(self, nodes: Sequence[_Node]) -> Iterator[_Node]:
        """Neighbours without a rule as one."""
        run: list[_Node] = []
        for node in nodes:
            if self._is_terminal(node):
                run.append(node)
                continue
            if run:
                yield _Node("sequence", inner=run)
                run = []
            yield node
        if run:
            yield _Node("sequence", inner=run)


def _sequence(parts: Sequence[str]) -> str:
    if not parts:
        return '""'
    return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"


def _refs(node: _Node) -> Iterator[str]:
    if node.kind == "ref":
        yield node.value
    for inner in node.inner:
        yield from _refs(inner)
