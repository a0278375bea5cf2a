"""Tells which tokens may come next in one completion, as its tokens come.

If the grammar leaves one way to go on, only the tokens of that way are allowed, as the tokenizer
writes its text. So a model that was taught text in these tokens isn't led to others. A caller that
takes such tokens without asking a model gets the same completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aioserve.grammars.follower import Follower
from aioserve.grammars.vocabulary import Vocabulary

__all__ = ["Grammar", "GrammarMatcher", "Matcher", "set_bits"]


class Grammar(Protocol):
    """Grammar that holds the completions of a request. Thread-safe."""

    @property
    def is_large(self) -> bool:
        """True if a call of one of its matchers may take seconds."""
        ...

    def matcher(self, end_ids: Set[int]) -> Matcher: ...


class Matcher(Protocol):
    """Tokens that may come next in one completion: see `GrammarMatcher`."""

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
    """Matcher of one completion.

    Its state depends on its tokens alone: two that accepted the same are equal. Not thread-safe,
    but any thread may use it. Calls may take milliseconds.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        follower: Follower,
        end_ids: Set[int],
        not_first: npt.NDArray[np.int32] | None,
        forced: tuple[int, ...] | None = None,
    ) -> None:
        """`not_first` is a mask like that of the vocabulary.

        `forced` are tokens that must come first, if known.
        """
        self._vocabulary = vocabulary
        self._not_first = not_first
        self._follower = follower
        self._end_ids = end_ids
        self._forced = forced
        """Forced tokens ahead; None while not known. They may be as long as the completion."""
        self._num_followed = 0
        """Number of forced tokens that were followed."""
        self.has_ended: bool = False

    @property
    def argument(self) -> str:
        """Parameter that decides what may come next."""
        return "structured_output"

    @property
    def error(self) -> str | None:
        """Reason why it allows nothing more, if that isn't due to the completion.

        The grammar was too expensive to follow.
        """
        return self._follower.error

    @property
    def is_accepting(self) -> bool:
        """True if the completion is valid as it is."""
        return self.error is None and self._follower.is_accepting

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False for one that isn't allowed, which changes nothing."""
        if self.has_ended or self.error is not None:
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
        if not self._follower.accept(token_id):
            return False
        self._num_followed += 1
        if self._forced is not None and self._num_followed >= len(self._forced):
            self._forced = None
        return True

    def accept_all(self, token_ids: Iterable[int]) -> bool:
        """Go on by each; False at the first that isn't allowed."""
        return all(self.accept(token_id) for token_id in token_ids)

    def forced(self, at_most: int | None = None) -> tuple[int, ...]:
        """Return the tokens that must come next, or the first of them.

        Empty if there is a choice, or if the completion may end.
        """
        if self._forced is None:
            self._forced, self._num_followed = self._look_ahead(), 0
        first = self._num_followed
        return self._forced[first : None if at_most is None else first + at_most]

    def allowed(self) -> npt.NDArray[np.int32]:
        """Return the mask int32 `[num_words]` of the tokens that may come next.

        Bit `i % 32` of word `i // 32` is set if id `i` may come. Ids that end the completion may
        come only where it is valid. No token may come if `error` is set, or if none can go on.
        """
        vocabulary = self._vocabulary
        mask = np.zeros(vocabulary.num_words, np.int32)
        if self.has_ended or self.error is not None:
            return mask
        if forced := self.forced(1):
            set_bits(mask, forced)
            return mask
        if not self._follower.is_stopped:
            words = self._follower.mask()
            if self.error is not None:
                return mask
            mask[: len(words)] = words[: len(mask)]
            if vocabulary.end < 32 * vocabulary.num_words:
                _clear(mask, (vocabulary.end,))
        if self._not_first is not None and not self._follower.has_begun:
            mask &= ~self._not_first
        (set_bits if self._follower.is_accepting else _clear)(mask, self._end_ids)
        return mask

    def behind(self, token_ids: Sequence[int]) -> list[npt.NDArray[np.int32]]:
        """Return the masks that `allowed` would give after each of `token_ids`.

        They go up to a token that isn't allowed or ends the completion. The matcher stays as it is.
        Empty once it has a lexer of its own: its room is for the completion, not for draft tokens.
        """
        masks: list[npt.NDArray[np.int32]] = []
        if not self._follower.shares:
            return masks
        other = GrammarMatcher(
            self._vocabulary, self._follower.copy(), self._end_ids, self._not_first
        )
        other.has_ended = self.has_ended
        other._forced, other._num_followed = self._forced, self._num_followed
        for token_id in token_ids:
            if not other.accept(token_id) or other.has_ended:
                break
            mask = other.allowed()
            other._follower.mask()  # tells if the earlier answers can be trusted
            if other.error is not None:
                break
            masks.append(mask)
        return masks

    def _differs_here(self, token_id: int) -> bool:
        not_first = self._not_first
        if not_first is None or self._follower.has_begun:
            return False
        return bool(not_first[token_id // 32] >> (token_id % 32) & 1)

    def _look_ahead(self) -> tuple[int, ...]:
        if self.has_ended or self.error is not None:
            return ()
        stopped = self._follower.is_stopped
        if stopped or self._follower.is_accepting:
            return tuple(self._end_ids) if stopped and len(self._end_ids) == 1 else ()
        end, ends = self._vocabulary.end, self._end_ids
        forced = self._follower.forced(lambda token_id: token_id < end and token_id not in ends)
        return () if forced and self._differs_here(forced[0]) else tuple(forced)


def set_bits(mask: npt.NDArray[np.int32], ids: Iterable[int]) -> None:
    """Allow these ids."""
    bits = mask.view(np.uint32)
    for token_id in ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(mask: npt.NDArray[np.int32], ids: Iterable[int]) -> None:
    bits = mask.view(np.uint32)
    for token_id in ids:
        bits[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
