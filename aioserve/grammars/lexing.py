"""Tells which terminals of a grammar can't be read one by one, the longest first.

    root: WORD "x" | "(" root ")"       WORD, [a-z]*, takes the "x" behind it as well

A lexer reads on as long as any terminal goes on. Where one that has ended may be followed by a
character by which another, or itself, goes on, the text that was meant is lost. The one that goes
on is to be written in smaller parts (`greedy`). Knows the nodes of a grammar, and
not how that is written.

What is found may be too much: a rule that is no terminal is looked at once for all the places that
lead to it, and a repeat that is counted like one that isn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

__all__ = ["Node", "greedy"]

MAX_LOOKS = 200_000
"""Most pairs of characters that are looked at. They take some 200 ms of a thread."""
MAX_COPIED = 1000
"""Characters of a terminal up to which a rule is looked at anew for each place that leads to it."""
LAST_CHAR = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Code points, each range with its ends."""


@dataclass(slots=True, eq=False)
class Node:
    kind: str
    """ "either", "sequence", "times" and "terminal" have `inner`; "ref" a rule's name as `value`,
    "text" the text, "class" an expression of Lark, and `ranges`; "times" how often, with the least
    number in `ranges`."""
    value: str = ""
    inner: Sequence[Node] = ()
    ranges: Ranges = ()


@dataclass(slots=True)
class _Shape:
    """Places that a text may begin with and end with."""

    is_empty: bool
    """Whether it may be empty."""
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


_EMPTY = _Shape(True)


class _Follow:
    """Places of a grammar, and which may follow which."""

    def __init__(self) -> None:
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
        """One behind the other."""
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
            self.after[place] |= first


class _Chars(_Follow):
    """Characters of one terminal."""

    def __init__(self, terminal: Node, rules: Mapping[str, Node]) -> None:
        super().__init__()
        self._rules = rules
        self._refs: dict[str, _Shape] = {}
        self.ranges: list[Ranges] = []
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
        self.ranges.append(ranges)
        place = frozenset([self.add()])
        return _Shape(False, place, place)

    def leads(self, places: Iterable[int]) -> list[tuple[int, int]]:
        """First bytes of the characters at these places, in UTF-8."""
        return [(_lead(low), _lead(high)) for place in places for low, high in self.ranges[place]]


class _Terminals(_Follow):
    """Terminals of a grammar."""

    def __init__(self, trees: Mapping[str, Node], rules: Mapping[str, Node], root: str) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.chars: list[_Chars] = []
        self._rules = rules
        self._places: dict[int, _Shape] = {}
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
            self.chars.append(_Chars(node, self._rules))
            place = frozenset([self.add()])
            self._places[id(node)] = _Shape(self.chars[-1].shape.is_empty, place, place)
        return self._places[id(node)]

    def following(self, place: int) -> list[tuple[int, int]]:
        """First bytes of what may follow a terminal."""
        leads = [self.chars[one].leads(self.chars[one].shape.first) for one in self.after[place]]
        return list({lead for each in leads for lead in each})


def greedy(trees: Mapping[str, Node], rules: Mapping[str, Node], root: str) -> list[Node]:
    """Terminals among the leaves of `trees`, which are rules that are no terminals, that may take
    what belongs behind another. `rules` are all rules. Empty where there is too much to look at."""
    terminals = _Terminals(trees, rules, root)
    together = {frozenset(after) for after in terminals.after} | {terminals.root.first}
    pairs = {pair for places in together for pair in product(places, places)}
    looks = [0]
    found: dict[int, None] = {}
    for one, other in sorted(pairs):
        if other in found:
            continue
        following = terminals.following(one)
        if _goes_on(terminals.chars[one], terminals.chars[other], following, looks):
            found[other] = None
        if looks[0] > MAX_LOOKS:
            return []
    return [terminals.nodes[place] for place in found]


def _goes_on(
    one: _Chars, other: _Chars, following: Sequence[tuple[int, int]], looks: list[int]
) -> bool:
    """Whether `other` goes on behind a text of `one` by a byte that may follow that."""
    seen: set[tuple[int, int]] = set()
    waiting = list(product(one.shape.first, other.shape.first))
    while waiting:
        looks[0] += 1
        if looks[0] > MAX_LOOKS:
            return False
        pair = waiting.pop()
        if pair in seen or not _overlap(one.ranges[pair[0]], other.ranges[pair[1]]):
            continue
        seen.add(pair)
        after = other.after[pair[1]]
        if pair[0] in one.shape.last and _overlap(other.leads(after), following):
            return True
        waiting += product(one.after[pair[0]], after)
    return False


def _overlap(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(low <= top and bottom <= high for low, high in some for bottom, top in others)


def _lead(code: int) -> int:
    """First byte of a character in UTF-8."""
    return chr(code).encode(errors="surrogatepass")[0]
