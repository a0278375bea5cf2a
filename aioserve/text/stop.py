"""Stop strings over a stream of text, without showing any part of one.

Knows text alone; must not know tokens or requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aioserve.errors import InvariantError

__all__ = ["StopStrings"]


class StopStrings:
    """Cuts a text at the first stop string to complete, however the text is chunked.

    Read character by character, the text ends with the first character at which it contains a stop;
    of several stops that end there the longest counts. Everything before that stop is
    given out, the stop and all after it never. While nothing has matched, what is held back is
    exactly the longest end of the text that begins some stop, so at most the longest stop minus one
    character. Costs O(1) amortised per character.

    Aho and Corasick, "Efficient string matching" (CACM 18:6, 1975): a state is the longest end of
    the text that begins some stop.

    With `include` the text is cut behind the stop instead, and nothing is held back. Text may be
    pushed that no stop can end in: one may then only begin there.
    """

    __slots__ = (
        "_depth",
        "_fail",
        "_goto",
        "_held",
        "_include",
        "_starts",
        "_state",
        "_stop_at",
        "matched",
    )

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if not stops or not all(stops):
            raise InvariantError(f"stop strings must be non-empty, got {stops!r}")
        self.matched: str | None = None
        """The stop that ended the text."""
        self._held = ""
        self._include = include
        self._state = 0
        self._goto: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._stop_at: list[str | None] = [None]
        self._fail: list[int] = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._starts = re.compile("[" + "".join(map(re.escape, self._goto[0])) + "]")

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Take more text; give out what is safe. Unless it `may_end` here, no stop ends in `text`.
        After a match: raises `InvariantError`."""
        if self.matched is not None:
            raise InvariantError(f"text after the stop string {self.matched!r}: {text!r}")
        if self._state == 0 and not self._starts.search(text):
            return text
        return self._scan(text, may_end)

    def flush(self) -> str:
        """The held text, when no more follows; empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _scan(self, text: str, may_end: bool) -> str:
        goto, fail = self._goto, self._fail
        state = self._state
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            stop = self._stop_at[state]
            if stop is not None and may_end:
                self.matched = stop
                self._held, self._state = "", 0
                return buffer[: end if self._include else end - len(stop)]
        while state and not goto[state]:  # a whole stop that wasn't to end here begins no other
            state = fail[state]
        self._state = state
        cut = len(buffer) - (0 if self._include else self._depth[state])
        self._held = buffer[cut:]
        return buffer[:cut]

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop_at.append(None)
                self._fail.append(0)
            state = self._goto[state][char]
        self._stop_at[state] = stop

    def _link(self) -> None:
        """Fail links, breadth first: the longest proper end of a state that is a state as well."""
        queue = list(self._goto[0].values())
        for state in queue:
            for char, child in self._goto[state].items():
                fail = self._fail[state]
                while fail and char not in self._goto[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._goto[fail].get(char, 0)
                queue.append(child)
            if self._stop_at[state] is None:
                self._stop_at[state] = self._stop_at[self._fail[state]]
