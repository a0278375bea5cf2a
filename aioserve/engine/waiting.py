"""How much waits for its first token, and how long that will take, as far as the past tells.

Counted in prompt tokens, a request's from when it is submitted until its answer begins. While
anything waits, steps and beginnings are added up, older ones weighing less: so many seconds of
steps let so many tokens begin. Steps in which nothing waits say nothing of how fast waiting ends,
and aren't counted. That covers what makes requests wait, be it long prompts before them or answers
that hold their places.

Knows numbers alone.
"""

from __future__ import annotations

from math import exp

__all__ = ["Waiting"]

MEMORY_SECONDS = 10.0
"""Of steps: what lies so far back weighs 1/e."""


class Waiting:
    """Of one engine."""

    __slots__ = ("_begun_tokens", "_seconds", "tokens")

    def __init__(self) -> None:
        self.tokens: int = 0
        """Of prompts whose answers haven't begun."""
        self._begun_tokens = 0.0
        self._seconds = 0.0

    def came(self, tokens: int) -> None:
        self.tokens += tokens

    def left(self, tokens: int) -> None:
        """Without an answer."""
        self.tokens -= tokens

    def began(self, tokens: int) -> None:
        """An answer to so many tokens."""
        self.tokens -= tokens
        self._begun_tokens += tokens

    def step_ended(self, seconds: float) -> None:
        """A step took so long, and something waits for another."""
        share = exp(-seconds / MEMORY_SECONDS)
        self._seconds = self._seconds * share + seconds
        self._begun_tokens *= share

    def seconds_for(self, tokens: int) -> float | None:
        """How long it takes until so many tokens have begun; None while nobody can tell."""
        if not self._seconds or self._begun_tokens < 1:
            return None
        return tokens * self._seconds / self._begun_tokens
