"""Finds the terminals of a grammar that can't be read one by one, the longest first.

    root: WORD "x" | "(" root ")"       WORD, [a-z]*, takes the "x" after it as well

A lexer reads on as long as any terminal goes on. A terminal that has ended may be followed by a
character by which another, or itself, goes on. Then the text that was meant is lost. The terminal
that goes on must be written in smaller parts (`greedy`). Knows the nodes of a grammar, but not how
they are written.

It may find too many. A rule that is no terminal is looked at once for all the places that lead to
it. A repeat that is counted is looked at like one that isn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import product

__all__ = ["LAST_CHAR", "Looks", "Node", "Ranges", "TooMuchError", "greedy"]

MAX_LOOKS = 300_000
"""Most pairs of characters, or of terminals, that are looked at. They take some 300 ms."""
MAX_COPIED = 1000
"""Characters of a terminal up to which a rule is looked at again for each place that leads to
it.
"""
LAST_CHAR = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Code points, each range with its ends."""


@dataclass(slots=True, eq=False)
class Node:
    kind: str
    """Kind of node: "either", "sequence", "times", "terminal", "ref", "text" or "class".

    "either", "sequence", "times" and "terminal" have `inner`. The `value` of "ref" is a rule's name
    and that of "text" the text. A "class" has an expression of Lark, and `ranges`. The `value` of
    "times" is its count, and `ranges` hold the least number.
    """
    value: str = ""
    inner: Sequence[Node] = ()
    ranges: Ranges = ()


@dataclass(slots=True)
class _Shape:
    """Places that a text may begin with and end with."""

    is_empty: bool
    """True if the text may be empty."""
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


_EMPTY = _Shape(True)


class TooMuchError(Exception):
    """The grammar is too much to look at."""


class Looks:
    """Budget of looks that are left. Beyond it, `spend` raises `TooMuchError`."""

    def __init__(self) -> None:
        self._left = MAX_LOOKS

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TooMuchError


class _Follow:
    """Places of a grammar, and which may follow which."""

    def __init__(self, looks: Looks) -> None:
        self.looks: Looks = looks
        self.after: list[set[int]] = []

    def add(self) -> int:
        self.after.append(set())
        return len(self.after) - 1

    def of(self, node: Node) -> _Shape:
        match node.kind:
            case "either":
                ways = [self.of(one) for one in node.inner]
                return _Shape(
                    any(way.is_empty for way in ways),
                    frozenset().union(*(way.first for way in ways)),
                    frozenset().union(*(way.last for way in ways)),
                )
            case "sequence":
                return self.joined([self.of(one) for one in node.inner])
            case "times":
                shape = self.of(node.inner[0])
                if node.value != "?":
                    self._join(shape.last, shape.first)
                may_be_none = node.ranges[0][0] == 0
                return _Shape(shape.is_empty or may_be_none, shape.first, shape.last)
            case _:
                return self.leaf(node)

    def joined(self, shapes: Iterable[_Shape]) -> _Shape:
        """Return the shape of these, one after the other."""
        whole = _EMPTY
        for shape in shapes:
            self._join(whole.last, shape.first)
            whole = _Shape(
                whole.is_empty and shape.is_empty,
                whole.first | shape.first if whole.is_empty else whole.first,
                whole.last | shape.last if shape.is_empty else shape.last,
            )
        return whole

    def leaf(self, node: Node) -> _Shape:
        raise NotImplementedError

    def _join(self, last: Iterable[int], first: frozenset[int]) -> None:
        for place in last:
            self.looks.spend(1 + len(first) // 8)
            self.after[place] |= first


class _Chars(_Follow):
    """Characters of one terminal."""

    def __init__(self, terminal: Node, rules: Mapping[str, Node], looks: Looks) -> None:
        super().__init__(looks)
        self._rules = rules
        self._refs: dict[str, _Shape] = {}
        self.ranges: list[Ranges] = []
        self._leads: list[int] = []
        self.shape: _Shape = self.of(terminal.inner[0])

    def leaf(self, node: Node) -> _Shape:
        if node.kind == "ref":
            if node.value not in self._refs or len(self.after) < MAX_COPIED:
                self._refs[node.value] = self.of(self._rules[node.value])
            return self._refs[node.value]
        if node.kind == "class":
            return self._char(node.ranges)
        return self.joined([self._char(((ord(char), ord(char)),)) for char in node.value])

    def _char(self, ranges: Ranges) -> _Shape:
        self.looks.spend(len(ranges))
        self.ranges.append(ranges)
        self._leads.append(_lead_bits(ranges))
        place = frozenset([self.add()])
        return _Shape(False, place, place)

    def leads(self, places: Iterable[int]) -> int:
        """Return the first bytes of the characters at these places, in UTF-8, each as a bit."""
        bits = 0
        for place in places:
            self.looks.spend(1)
            bits |= self._leads[place]
        return bits


class _Terminals(_Follow):
    """Terminals of a grammar."""

    def __init__(
        self, trees: Mapping[str, Node], rules: Mapping[str, Node], root: str, looks: Looks
    ) -> None:
        super().__init__(looks)
        self.nodes: list[Node] = []
        self.chars: list[_Chars] = []
        self._rules = rules
        self._places: dict[int, _Shape] = {}
        self._following: dict[int, int] = {}
        self._shapes = {name: _Shape(False) for name in trees}
        has_changed = True
        while has_changed:
            has_changed = False
            for name, tree in trees.items():
                shape = self.of(tree)
                has_changed |= shape != self._shapes[name]
                self._shapes[name] = shape
        self.root: _Shape = self._shapes[root]

    def leaf(self, node: Node) -> _Shape:
        if node.kind == "ref":
            return self._shapes[node.value]
        if id(node) not in self._places:
            self.nodes.append(node)
            self.chars.append(_Chars(node, self._rules, self.looks))
            place = frozenset([self.add()])
            self._places[id(node)] = _Shape(self.chars[-1].shape.is_empty, place, place)
        return self._places[id(node)]

    def following(self, place: int) -> int:
        """Return the first bytes of what may follow a terminal, each as a bit."""
        if place not in self._following:
            bits = 0
            for one in self.after[place]:
                bits |= self.chars[one].leads(self.chars[one].shape.first)
            self._following[place] = bits
        return self._following[place]


def greedy(
    trees: Mapping[str, Node], rules: Mapping[str, Node], root: str, looks: Looks
) -> list[Node]:
    """Return terminals that may take text that belongs to a later one.

    They are among the leaves of `trees`, which are the rules that are no terminals. `rules` are all
    rules. Raises `TooMuchError`.
    """
    terminals = _Terminals(trees, rules, root, looks)
    waiting: list[tuple[int, int]] = []
    seen: set[tuple[int, int]] = set()
    _add_pairs(terminals.root.first, terminals.root.first, waiting, seen, looks)
    found: set[int] = set()
    while waiting:
        one, other = waiting.pop()
        goes_on, meets = _compared(
            terminals.chars[one], terminals.chars[other], terminals.following(one), looks
        )
        if goes_on:
            found.add(other)
        if meets:
            _add_pairs(terminals.after[one], terminals.after[other], waiting, seen, looks)
    return [terminals.nodes[place] for place in sorted(found)]


def _compared(one: _Chars, other: _Chars, following: int, looks: Looks) -> tuple[bool, bool]:
    """Compare two terminals.

    The first result is true if `other` goes on after a text of `one` by a byte that may follow it.
    The second is true if they have a text in common.
    """
    goes_on = meets = False
    waiting: list[tuple[int, int]] = []
    seen: set[tuple[int, int]] = set()
    _add_pairs(one.shape.first, other.shape.first, waiting, seen, looks)
    while waiting:
        first, second = waiting.pop()
        if not _overlap(one.ranges[first], other.ranges[second]):
            continue
        after = other.after[second]
        if first in one.shape.last:
            meets |= second in other.shape.last
            goes_on = goes_on or bool(other.leads(after) & following)
        _add_pairs(one.after[first], after, waiting, seen, looks)
    return goes_on, meets


def _add_pairs(
    some: Set[int],
    others: Set[int],
    waiting: list[tuple[int, int]],
    seen: set[tuple[int, int]],
    looks: Looks,
) -> None:
    looks.spend(1 + len(some) * len(others))
    new = {*product(some, others)} - seen
    seen |= new
    waiting += new


def _overlap(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(low <= top and bottom <= high for low, high in some for bottom, top in others)


def _lead_bits(ranges: Ranges) -> int:
    """Return the first bytes of characters in UTF-8, each as a bit."""
    bits = 0
    for low, high in ranges:
        first, last = (chr(code).encode(errors="surrogatepass")[0] for code in (low, high))
        bits |= (2 << last) - (1 << first)
    return bits
