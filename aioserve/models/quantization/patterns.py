"""Regular expressions of files, matched in a bounded number of steps, whatever they say.

Python's own engine tries every way to match: one expression can hold a process up for ever. Here
the places where a part may end are a set, found once for each place where it may begin. Libraries
that match in linear time (RE2 and its kin) know no looks ahead, which files use to spare modules
("re:^(?!.*lm_head).*"), and one with a time limit would refuse a file on a busy machine alone.
Expressions without groups and repetitions are matched by Python's engine: it has one way.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from aioserve.errors import WeightsError
from aioserve.isolation import shown

__all__ = ["MAX_PATTERN_CHARS", "MAX_STEPS", "Pattern"]

MAX_PATTERN_CHARS = 1000
MAX_STEPS = 20_000
"""Most places that the parts of one expression begin at in one text. Common ones take hundreds."""
_MOST_DEPTH = 20
"""Most groups within groups."""
_SINGLE = re.compile(
    r"\\[dDwWsS]|\\[^\w\s]|\[\^?\]?(?:\\[dDwWsS]|\\[^\w\s]|[^\]\\\[])*\]|[^\\\[\](){}*+?|^$]",
    re.ASCII,
)
"""What stands for one character."""
_SIMPLE = re.compile(rf"\^?(?:{_SINGLE.pattern})*\$?", re.ASCII)
_GROUP = re.compile(r"\((\?:|\?=|\?!|(?!\?))")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d{1,2})(?:(,)(\d{0,2}))?\})\??(?![*+?{])", re.ASCII)


class _Run:
    """One text, and what was found in it so far."""

    def __init__(self, source: str, text: str) -> None:
        self.text = text
        self._source = source
        self._found: dict[tuple[int, int], frozenset[int]] = {}
        self._steps = 0

    def ends(self, part: _Part, places: frozenset[int]) -> frozenset[int]:
        """Where `part` may end that begins at one of the places."""
        return frozenset().union(*(self._from(part, place) for place in places))

    def _from(self, part: _Part, place: int) -> frozenset[int]:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _wrong(self._source, f"takes more than {MAX_STEPS} steps to match")
        key = id(part), place
        if (found := self._found.get(key)) is None:
            self._found[key] = found = part(self, place)
        return found


_Part = Callable[[_Run, int], frozenset[int]]
_NOWHERE: frozenset[int] = frozenset()


class Pattern:
    """An expression of characters, classes of them, groups, alternatives, repetitions, looks
    ahead, `^` and `$`.

    Raises `WeightsError` for one that has anything else, or is too long.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_PATTERN_CHARS:
            raise _wrong(source, f"must have at most {MAX_PATTERN_CHARS} characters")
        self._source = source
        self._at = 0
        self._simple: re.Pattern[str] | None = None
        if _SIMPLE.fullmatch(source):
            self._simple = self._compiled(source)
            return
        self._whole = self._alternatives(0)
        if self._at < len(source):
            raise self._unknown()

    @property
    def is_simple(self) -> bool:
        """Whether it has neither groups nor repetitions, so that matching takes next to no time."""
        return self._simple is not None

    def matches(self, text: str) -> bool:
        """Whether `text` begins with what this stands for, as `re.match` has it.

        Raises `WeightsError` where it takes too many steps to tell.
        """
        if self._simple is not None:
            return self._simple.match(text) is not None
        return bool(_Run(self._source, text).ends(self._whole, frozenset((0,))))

    # -- parsing

    def _alternatives(self, depth: int) -> _Part:
        if depth > _MOST_DEPTH:
            raise _wrong(self._source, f"must have at most {_MOST_DEPTH} groups within groups")
        found = [self._sequence(depth)]
        while self._source.startswith("|", self._at):
            self._at += 1
            found.append(self._sequence(depth))

        def alternatives(run: _Run, place: int) -> frozenset[int]:
            return frozenset().union(*(run.ends(one, frozenset((place,))) for one in found))

        return alternatives

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            parts.append(self._repeated(self._one(depth)))

        def sequence(run: _Run, place: int) -> frozenset[int]:
            places = frozenset((place,))
            for part in parts:
                places = run.ends(part, places)
            return places

        return sequence

    def _one(self, depth: int) -> _Part:
        source, at = self._source, self._at
        if source[at] in "^$":
            self._at += 1
            return _start if source[at] == "^" else _end
        if (single := _SINGLE.match(source, at)) is not None:
            self._at = single.end()
            return _single(self._compiled(single[0]))
        if (group := _GROUP.match(source, at)) is None:
            raise self._unknown()
        self._at = group.end()
        inside = self._alternatives(depth + 1)
        if not source.startswith(")", self._at):
            raise self._unknown()
        self._at += 1
        return inside if group[1] in ("", "?:") else _look_ahead(inside, group[1] == "?=")

    def _repeated(self, part: _Part) -> _Part:
        found = _QUANTIFIER.match(self._source, self._at)
        if found is None:
            return part
        self._at = found.end()
        if found[1] is None:
            return _repetition(part, int(found[0][0] == "+"), 1 if found[0][0] == "?" else None)
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self._unknown()
        return _repetition(part, least, most)

    def _compiled(self, part: str) -> re.Pattern[str]:
        try:
            return re.compile(part)
        except re.error as error:
            raise self._unknown() from error

    def _unknown(self) -> WeightsError:
        rest = self._source[self._at :]
        return _wrong(self._source, f"{shown(rest)} is no part of an expression that is known")


def _single(characters: re.Pattern[str]) -> _Part:
    def single(run: _Run, place: int) -> frozenset[int]:
        fits = characters.fullmatch(run.text, place, place + 1) if place < len(run.text) else None
        return _NOWHERE if fits is None else frozenset((place + 1,))

    return single


def _look_ahead(inside: _Part, wanted: bool) -> _Part:
    def look_ahead(run: _Run, place: int) -> frozenset[int]:
        here = frozenset((place,))
        return here if bool(run.ends(inside, here)) is wanted else _NOWHERE

    return look_ahead


def _repetition(part: _Part, least: int, most: int | None) -> _Part:
    def repetition(run: _Run, place: int) -> frozenset[int]:
        places = frozenset((place,))
        for _ in range(least):
            places = run.ends(part, places)
        reached, times = places, 0
        while places and (most is None or times < most - least):
            places = run.ends(part, places) - reached
            reached |= places
            times += 1
        return reached

    return repetition


def _start(run: _Run, place: int) -> frozenset[int]:
    return _NOWHERE if place else frozenset((0,))


def _end(run: _Run, place: int) -> frozenset[int]:
    """Before a line's end that ends the text, too."""
    return frozenset((place,)) if run.text[place:] in ("", "\n") else _NOWHERE


def _wrong(source: str, why: str) -> WeightsError:
    return WeightsError(f"quantization_config: the expression {shown(source)}: {why}")
