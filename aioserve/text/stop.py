"""Search for stop strings in a stream of text, without delivering any part of one.

Knows text alone; must not know tokens or requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aioserve.errors import InvariantError

__all__ = ["StopAutomaton", "StopStrings"]


class StopAutomaton:
    """Automaton over the beginnings of some stop strings.

    It never changes once it is made, so completions with the same stop strings share one. A state
    is the longest end of the text that begins some stop; state 0 is the empty one. Making it takes
    time and memory in proportion to the characters of all stops together. See Aho and Corasick,
    "Efficient string matching" (CACM 18:6, 1975).
    """

    __slots__ = ("_fail", "_goto", "_starts", "depth", "stop_at")

    def __init__(self, stops: Sequence[str]) -> None:
        """Make the automaton. Raises `InvariantError` unless there are stops, none of them
        empty.
        """
        if not stops or not all(stops):
            raise InvariantError(f"stop strings must be non-empty, got {stops!r}")
        self.depth: list[int] = [0]
        """Number of characters, by state."""
        self.stop_at: list[str | None] = [None]
        """Longest stop that ends there, by state."""
        self._goto: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._starts = re.compile("[" + "".join(map(re.escape, self._goto[0])) + "]")

    def step(self, state: int, char: str) -> int:
        """Return the state after `char`. Costs O(1) amortised over a text."""
        goto, fail = self._goto, self._fail
        while state and char not in goto[state]:
            state = fail[state]
        return goto[state].get(char, 0)

    def may_begin_in(self, text: str) -> bool:
        """True if `text` has the first character of any stop."""
        return self._starts.search(text) is not None

    def open_state(self, state: int) -> int:
        """Return the longest end of `state` from which a stop goes on.

        A whole stop that begins no other isn't one.
        """
        while state and not self._goto[state]:
            state = self._fail[state]
        return state

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self.depth.append(self.depth[state] + 1)
                self.stop_at.append(None)
                self._fail.append(0)
            state = self._goto[state][char]
        self.stop_at[state] = stop

    def _link(self) -> None:
        """Make fail links, breadth first: the longest proper end of a state that is a state
        itself.
        """
        queue = list(self._goto[0].values())
        for state in queue:
            for char, child in self._goto[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                queue.append(child)
            if self.stop_at[state] is None:
                self.stop_at[state] = self.stop_at[self._fail[state]]


class StopStrings:
    """Cuts a text at the first stop string to complete, however the text is chunked.

    Read character by character, the text ends with the first character at which it contains a stop.
    The longest of several stops that end there counts. Everything before that stop is delivered,
    the stop and all after it never. Without a match, exactly the longest end of the text that
    begins some stop is held back. So that is at most the longest stop minus one character. Costs
    O(1) amortised per character.

    With `include` the text is cut after the stop instead, and nothing is held back. Text may also
    be pushed in which no stop can end; a stop may begin there.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, automaton: StopAutomaton, *, include: bool = False) -> None:
        self.matched: str | None = None
        """The stop that ended the text."""
        self._automaton = automaton
        self._held = ""
        self._include = include
        self._state = 0

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Read more text; return what is safe to deliver.

        With `may_end` false, no stop ends in `text`. Raises `InvariantError` after a match.
        """
        if self.matched is not None:
            raise InvariantError(f"text after the stop string {self.matched!r}: {text!r}")
        if self._state == 0 and not self._automaton.may_begin_in(text):
            return text
        return self._scan(text, may_end)

    def flush(self) -> str:
        """Return the held text, when no more follows; empty after a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _scan(self, text: str, may_end: bool) -> str:
        automaton, state = self._automaton, self._state
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.step(state, char)
            stop = automaton.stop_at[state]
            if stop is not None and may_end:
                self.matched = stop
                self._held, self._state = "", 0
                return buffer[: end if self._include else end - len(stop)]
        self._state = automaton.open_state(state)
        cut = len(buffer) - (0 if self._include else automaton.depth[self._state])
        self._held = buffer[cut:]
        return buffer[:cut]
