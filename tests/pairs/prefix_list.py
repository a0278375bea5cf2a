"""Prefix cache as a plain list: what a request must find, of everything computed before.

Knows page sizes. Must not know trees, pages or evictions.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.pairs.asks import Ask, Brought

__all__ = ["PrefixList"]


class PrefixList:
    """All sequences that were computed, in whole pages."""

    def __init__(self, page_size: int, *, partial: bool) -> None:
        self._page_size = page_size
        self._partial = partial
        self._kept: list[tuple[int, ...]] = []

    def add(self, ask: Ask, brought: Brought) -> None:
        """Add `ask`, which has come to its end, or was left. The last token of a completion isn't
        computed."""
        answers = [*brought.ids, *[beam.token_ids for beam in brought.beams]] or [()]
        for answer in answers:
            known = (*ask.prompt, *answer[:-1])
            if not answer and brought.left:
                continue  # it is unknown how far its prompt has come
            self._kept.append(known[: len(known) // self._page_size * self._page_size])

    def hit_tokens(self, ask: Ask) -> int:
        """Tokens of its prompt that need no computing."""
        usable = ask.prompt[: _usable(ask)]
        longest = max([_common(usable, kept) for kept in self._kept], default=0)
        return longest if self._partial else longest // self._page_size * self._page_size


def _usable(ask: Ask) -> int:
    """Leading tokens of which only keys and values are wanted. The last one is always computed, and
    so are those whose logits or hidden states are asked for."""
    if ask.params.prompt_logprobs is not None or ask.way == "mean":
        return 0
    return len(ask.prompt) - 1


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
