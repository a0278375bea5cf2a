"""Windows that a model reads a text in, and the scored tokens of each.

    tokens    0 1 2 3 4 5 6 7 8 9 ...
    window 0  [. * * * * *]             . context alone    * scored
    window 1      [. . . . * *]         size 6, stride 2
    window 2          [. . . . * *]

Special tokens that a model expects before a text (BOS) stand before every window. They are context
and never scored. This module handles counts of tokens, and no tokens.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Window", "second_halves", "sliding_windows"]


class Window(NamedTuple):
    """Tokens `[start, end)` of a text. Tokens from `scored` on are scored, at least one."""

    start: int
    scored: int
    end: int

    @property
    def num_scored(self) -> int:
        return self.end - self.scored


def sliding_windows(num_tokens: int, size: int, stride: int, num_before: int) -> list[Window]:
    """Return windows of at most `size` tokens, each `stride` tokens after the one before.

    Each token is scored once, except a text's first token without special tokens before it. A token
    has at least `size - stride + num_before` tokens of context, or all that precede it.
    `num_before` counts special tokens before every window. Raises `ValueError` if a token would
    have no context.
    """
    if not 1 <= stride <= size or size - stride + num_before < 1:
        raise ValueError(f"windows of {size} and {num_before} tokens can't have stride {stride}")
    windows: list[Window] = []
    start, scored = 0, 0 if num_before else 1
    while scored < num_tokens:
        end = min(start + size, num_tokens)
        windows.append(Window(start, scored, end))
        start, scored = start + stride, end
    return windows


def second_halves(num_tokens: int, context: int, num_before: int) -> list[Window]:
    """Return the windows of llama.cpp's perplexity: consecutive chunks of `context` tokens, BOS
    included.

    The second half of each is scored, except its first token. Tokens after the last whole chunk
    are left out. In each chunk but the first, BOS replaces a token.
    """
    return [
        Window(
            first,
            first + context // 2 + 1 - num_before,
            first + context - num_before,
        )
        for first in range(0, num_tokens + num_before - context + 1, context)
    ]
