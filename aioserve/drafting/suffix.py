"""Suffix decoding: what followed the last tokens most often, here and in recent answers."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve import _native
from aioserve.arguments import check, integer, number
from aioserve.drafting.at_once import AtOnce
from aioserve.drafting.drafter import DraftedSequence
from aioserve.errors import ConfigError

__all__ = ["SuffixDrafter"]

MAX_DEPTH = 256
MAX_CACHE_TOKENS = 2**24


class SuffixDrafter(AtOnce):
    """Guesses what followed the last tokens most often, in the sequence and in recent answers.

    After SuffixDecoding (Oliaro et al., arXiv 2411.04975). A suffix tree over prompt and answer of
    each sequence, and one over the recent answers of each namespace, count what stood where. Each
    suffix of the last tokens that is in a tree has a guess: on by the most frequent token, of
    equals the one that came last, while the product of the shares that these tokens had is at
    least `min_probability`, and for at most `max_factor` tokens per token of the suffix. The sum of
    these products is how many tokens are expected to come true, and the guess that most is
    expected of is taken; of equals the sequence's own, then the one with the longest suffix. Before
    that, where two last tokens of the answer or all of it stand in what the caller predicts, the
    prediction is followed.

    Runs are told apart by their first `max_depth` tokens; a guess that goes on behind these follows
    the last of them, and at the end of a sequence itself, as a loop does.

    An answer is counted among the recent ones when its slot ends, and no longer when the sequence
    starts again, which is told by its namespace, its prompt and how its answer begins. At most
    `cache_tokens` tokens of answers are kept, two marks for each answer and the room of those that
    no longer count included; the oldest answers go first. Nothing of one namespace is searched for
    another.

    Memory is at most 104 bytes for each token of a sequence, 132 for each of recent answers and of
    predictions, and twice that where vectors have grown. Not thread-safe.
    """

    is_quick = True

    def __init__(
        self,
        *,
        max_depth: int = 64,
        max_factor: float = 1.5,
        min_probability: float = 0.1,
        cache_tokens: int = 65_536,
    ) -> None:
        """Raises `ConfigError` unless `2 <= max_depth <= 256`, `0 < max_factor`,
        `0 <= min_probability <= 1` and `0 <= cache_tokens <= 2**24`."""
        self._native = _native.SuffixDrafter(
            check(ConfigError, "max_depth", max_depth, integer(2, MAX_DEPTH)),
            check(ConfigError, "max_factor", max_factor, number(0, above=True)),
            check(ConfigError, "min_probability", min_probability, number(0, 1)),
            check(ConfigError, "cache_tokens", cache_tokens, integer(0, MAX_CACHE_TOKENS)),
        )

    @property
    def num_bytes(self) -> int:
        """Memory that is taken for all slots and recent answers."""
        return self._native.num_bytes

    @property
    def num_cached_tokens(self) -> int:
        """How many of `cache_tokens` are taken."""
        return self._native.num_cached_tokens

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        """Raises `InvariantError` where the slot has not ended, `ValueError` for ids below 0."""
        self._native.start(
            slot,
            sequence.known_ids,
            sequence.prompt_tokens,
            sequence.namespace,
            sequence.predicted_ids,
        )

    def end(self, slot: int) -> None:
        self._native.end(slot)

    def extend_all(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        self._native.extend(slots, token_ids)

    def draft_all(self, slots: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return self._native.draft(slots, limits)

    def sanity_check(self) -> None:
        """Recounts all trees. Raises `InvariantError` where something is off."""
        self._native.sanity_check()
