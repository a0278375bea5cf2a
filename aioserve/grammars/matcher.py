"""Tells which tokens may come next in one completion, as its tokens come.

Where the grammar leaves one way to go on, the tokens of that way, as the tokenizer writes its text,
are the only ones allowed: a model that was taught text in these tokens is not led to others, and
a caller that takes such tokens without asking a model gets the same completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aioserve.grammars.vocabulary import Vocabulary

__all__ = ["Grammar", "GrammarMatcher", "Matcher", "set_bits"]


class Grammar(Protocol):
    """What holds the completions of a request. Thread-safe."""

    def matcher(self, end_ids: Set[int]) -> Matcher: ...


class Matcher(Protocol):
    """What may come next in one completion: see `GrammarMatcher`."""

    @property
    def has_ended(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    @property
    def argument(self) -> str: ...
    def accept(self, token_id: int) -> bool: ...
    def accept_all(self, token_ids: Iterable[int]) -> bool: ...
    def forced(self, at_most: int | None = None) -> tuple[int, ...]: ...
    def allowed(self) -> npt.NDArray[np.int32]: ...
    def behind(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.int32]]: ...


class GrammarMatcher:
    """Matcher of one completion. Its state depends on its tokens alone: two that accepted the same
    are equal. Not thread-safe, and any thread may use it; calls may take milliseconds."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: Any,
        end_ids: Set[int],
        not_first: npt.NDArray[np.int32] | None,
        forced: tuple[int, ...] | None = None,
    ) -> None:
        """`not_first`: a mask like that of the vocabulary. `forced`: tokens that must come first,
        if known."""
        self._vocabulary = vocabulary
        self._not_first = not_first
        self._matcher = matcher
        self._end_ids = end_ids
        self._forced = forced
        """Forced tokens ahead; None while not known. They may be as long as the completion."""
        self._num_followed = 0
        """Number of forced tokens that were followed."""
        self._num_accepted = 0
        self.has_ended: bool = False

    @property
    def argument(self) -> str:
        """The parameter that says what may come next."""
        return "structured_output"

    @property
    def error(self) -> str | None:
        """Reason why it allows nothing any more, if that is not due to the completion: the grammar
        was too costly to follow."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._failed else None

    @property
    def _failed(self) -> bool:
        return self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the completion is valid as it is."""
        return not self._failed and self._matcher.is_accepting()

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False for one that isn't allowed, which changes nothing."""
        if self.has_ended or self._failed:
            return False
        if token_id in self._end_ids:
            self.has_ended = self.is_accepting
            if self.has_ended:
                self._forced, self._num_followed = (), 0
            return self.has_ended
        forced = self.forced(1)
        if forced and token_id != forced[0]:
            return False
        if not 0 <= token_id < self._vocabulary.end or self._differs_here(token_id):
            return False
        if self._matcher.validate_tokens([token_id]) != 1:
            return False
        if not self._matcher.consume_token(token_id):
            return False
        self._num_followed += 1
        if self._forced is not None and self._num_followed >= len(self._forced):
            self._forced = None
        self._num_accepted += 1
        return True

    def accept_all(self, token_ids: Iterable[int]) -> bool:
        """Go on by each; False at the first that isn't allowed."""
        return all(self.accept(token_id) for token_id in token_ids)

    def forced(self, at_most: int | None = None) -> tuple[int, ...]:
        """The tokens that must come next, or the first of them; empty where there is a choice, or
        the completion may end."""
        if self._forced is None:
            self._forced, self._num_followed = self._look_ahead(), 0
        first = self._num_followed
        return self._forced[first : None if at_most is None else first + at_most]

    def allowed(self) -> npt.NDArray[np.int32]:
        """Mask int32 `[num_words]`: bit `i % 32` of word `i // 32` says whether id `i` may come
        next. Ids that end the completion may where it is valid, and nowhere else. None may where
        `error` is set, or no token can go on."""
        vocabulary = self._vocabulary
        mask = np.zeros(vocabulary.num_words, np.int32)
        if self.has_ended or self._failed:
            return mask
        if forced := self.forced(1):
            set_bits(mask, forced)
            return mask
        if not self._matcher.is_stopped():
            words = np.zeros(vocabulary.end // 32 + 1, np.int32)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._failed:
                return mask
            _clear(words, (vocabulary.end,))
            mask[: len(words)] = words[: len(mask)]
        if self._not_first is not None and not self._num_accepted:
            mask &= ~self._not_first
        (set_bits if self._matcher.is_accepting() else _clear)(mask, self._end_ids)
        return mask

    def behind(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        """What `allowed` would say behind the first of `token_ids`, behind the first two and so on,
        up to one that isn't allowed or ends the completion. The matcher stays as it is."""
        other = GrammarMatcher(
            self._vocabulary, self._matcher.deep_copy(), self._end_ids, self._not_first
        )
        other._num_accepted, other.has_ended = self._num_accepted, self.has_ended
        other._forced, other._num_followed = self._forced, self._num_followed
        masks: list[npt.NDArray[np.int32]] = []
        for token_id in token_ids:
            if not other.accept(token_id) or other.has_ended:
                break
            masks.append(other.allowed())
        return masks

    def _differs_here(self, token_id: int) -> bool:
        not_first = self._not_first
        if not_first is None or self._num_accepted:
            return False
        return bool(not_first[token_id // 32] >> (token_id % 32) & 1)

    def _look_ahead(self) -> tuple[int, ...]:
        if self.has_ended or self._failed:
            return ()
        if self._matcher.is_stopped() or self._matcher.is_accepting():
            only = self._matcher.is_stopped() and len(self._end_ids) == 1
            return tuple(self._end_ids) if only else ()
        forced = self._matcher.compute_ff_tokens()
        end, ends = self._vocabulary.end, self._end_ids
        known = next((n for n, i in enumerate(forced) if i >= end or i in ends), len(forced))
        if known and self._differs_here(forced[0]):
            return ()
        return tuple(forced[: self._matcher.validate_tokens(forced[:known])]) if known else ()


def set_bits(mask: npt.NDArray[np.int32], ids: Iterable[int]) -> None:
    """Allow these ids."""
    bits = mask.view(np.uint32)
    for token_id in ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(mask: npt.NDArray[np.int32], ids: Iterable[int]) -> None:
    bits = mask.view(np.uint32)
    for token_id in ids:
        bits[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
