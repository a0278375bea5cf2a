"""Suffix decoding: propose what followed the last tokens most often, here and in recent
completions."""

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
    """Proposes what followed the last tokens most often, in the sequence and in recent completions.

    After SuffixDecoding (Oliaro et al., arXiv 2411.04975). A suffix tree over prompt and completion
    of each sequence counts what stood where, and so does one over the recent completions of each
    namespace.

    Each suffix of the last tokens that is in a tree has a draft. It goes on by the most frequent
    token, and among equals by the one that came last. Each token had a share of what followed
    there. The draft ends before the product of these shares falls below `min_probability`, or after
    `max_factor` tokens per token of the suffix. The sum of these products is the expected number of
    right tokens, and the draft with the largest sum is taken. Among equals the sequence's own comes
    first, then the one with the longest suffix.

    The caller's prediction comes before that. If it contains the last two tokens of the completion,
    or all of a shorter one, the prediction is followed.

    Runs are told apart by their first `max_depth` tokens. A draft that goes on after these follows
    the last of them. At the end of a sequence it goes on into itself, like a loop.

    A completion counts as recent once its slot ends. If the sequence starts again, which is told by
    its namespace, its prompt and how its completion begins, it counts no more. At most
    `cache_tokens` tokens of completions are kept, and the oldest go first. These include two marks
    for each completion, and the room of those that no longer count. Nothing of one namespace is
    searched for another.

    Memory is at most 104 bytes for each token of a sequence, and 132 for each token of recent
    completions and of predictions. After vectors have grown it is twice that. Not thread-safe.
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
        """Raises `ConfigError` unless `2 <= max_depth <= 256`, `0 < max_factor`, `0 <=
        min_probability <= 1` and `0 <= cache_tokens <= 2**24`."""
        self._native = _native.SuffixDrafter(
            check(ConfigError, "max_depth", max_depth, integer(2, MAX_DEPTH)),
            check(ConfigError, "max_factor", max_factor, number(0, above=True)),
            check(ConfigError, "min_probability", min_probability, number(0, 1)),
            check(ConfigError, "cache_tokens", cache_tokens, integer(0, MAX_CACHE_TOKENS)),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of memory for all slots and recent completions."""
        return self._native.num_bytes

    @property
    def num_cached_tokens(self) -> int:
        """Tokens taken of `cache_tokens`."""
        return self._native.num_cached_tokens

    def start(self, slot: int, sequence: DraftedSequence) -> None:
        """Raises `InvariantError` if the slot has not ended, `ValueError` for ids below 0."""
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
        """Recount all trees. Raises `InvariantError` if something is off."""
        self._native.sanity_check()
