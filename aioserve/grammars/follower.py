"""Follows one completion with llguidance's matcher.

Completions share a lexer while it has room. Copies of the library's matcher share one lexer, whose
states only grow, up to a limit. A full lexer takes what it doesn't know for a dead end, and not
each call marks that as an error. Computing a mask does. So an answer that a full lexer could spoil
counts only if a mask was computed after it. If that fails, the completion gets a lexer of its own,
follows its tokens there, and asks again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Follower"]


class Follower:
    """State of the library for one completion. Not thread-safe."""

    def __init__(self, matcher: Any, alone: Callable[[], Any] | None, num_words: int) -> None:
        """`alone` makes a matcher of the library that shares nothing.

        None: `matcher` shares nothing. `num_words` is the number of int32s of a mask.
        """
        self._matcher = matcher
        self._alone = alone
        self._num_words = num_words
        self._ids = array("i")
        """Tokens so far."""
        self._mask: npt.NDArray[np.int32] | None = None
        """Mask of the next token, if known."""

    @property
    def has_begun(self) -> bool:
        return bool(self._ids)

    @property
    def shares(self) -> bool:
        """True if others use its lexer."""
        return self._alone is not None

    @property
    def error(self) -> str | None:
        """Reason why it can't go on: the grammar was too expensive to follow."""
        if not self._matcher.is_error() or self._is_rid_of_others():
            return None
        return str(self._matcher.get_error()).partition("\n")[0]

    @property
    def is_accepting(self) -> bool:
        """True if the completion is valid at this point."""
        return self._matcher.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """True if no token can go on."""
        stopped = self._matcher.is_stopped()
        return self._matcher.is_stopped() if stopped and self._is_rid_of_others() else stopped

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False for one that isn't allowed, which changes nothing."""
        one = [token_id]
        accepted = self._matcher.validate_tokens(one) == 1 and self._matcher.consume_token(token_id)
        if not accepted and self._is_rid_of_others():
            return self.accept(token_id)
        if accepted:
            self._ids.append(token_id)
            self._mask = None
        return accepted

    def forced(self, is_known: Callable[[int], bool]) -> list[int]:
        """Return the tokens that must come next, up to one that isn't known."""
        found = self._matcher.compute_ff_tokens()
        count = next((n for n, i in enumerate(found) if not is_known(i)), len(found))
        count = self._matcher.validate_tokens(found[:count]) if count else 0
        return self.forced(is_known) if self._is_rid_of_others() else found[:count]

    def mask(self) -> npt.NDArray[np.int32]:
        """Return the mask int32 `[num_words]` of the tokens that may come next.

        With an `error` it may be anything.
        """
        if self._mask is None:
            self._mask = self._computed()
            if self._matcher.is_error() and self._is_rid_of_others():
                self._mask = self._computed()
        return self._mask

    def copy(self) -> Follower:
        """Return one that goes on from here, for draft tokens.

        If the lexer is full it has an error, since draft tokens don't justify a lexer of their own.
        """
        other = Follower(self._matcher.deep_copy(), None, self._num_words)
        other._ids = self._ids[:1]
        return other

    def _computed(self) -> npt.NDArray[np.int32]:
        words = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words

    def _is_rid_of_others(self) -> bool:
        """Leave a lexer that is full. Return true if it has just been left."""
        if self._alone is None:
            return False
        self._mask = self._computed()
        if not self._matcher.is_error():
            return False
        alone, self._alone, self._mask = self._alone, None, None
        self._matcher = alone()
        self._matcher.consume_tokens(self._ids.tolist())
        return True
