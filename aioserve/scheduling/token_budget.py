"""Tokens of one step: shares kept for some sequences, and the rest in common for all.

Without shares all tokens are in common. Knows the policy's answer, and nothing about what is
planned.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.scheduling.policy import StepBudget
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.state import SchedulerState

__all__ = ["TokenBudget"]


class TokenBudget:
    """Tokens left in one step. The planner takes them."""

    def __init__(self, state: SchedulerState, budget: StepBudget | None = None) -> None:
        self._state = state
        most = state.max_num_batched_tokens
        self.tokens: int = most if budget is None or budget.tokens is None else budget.tokens
        """Tokens left, those in shares included."""
        self.taken: int = 0
        self._share_of: dict[SequenceState, int] = {}
        self._kept: list[int] = []
        """Tokens left in each share."""
        for number, share in enumerate(() if budget is None else budget.shares):
            self._kept.append(share.tokens)
            for request in share.requests:
                self._share_of[state.sequence_of(request)] = number

    def left_for(self, sequence: SequenceState) -> int:
        """Tokens that a sequence may still have."""
        if not self._kept:
            return self.tokens
        return max(0, _left(self.tokens - sum(self._kept), self._kept, self._own(sequence)))

    def one_each(self, ready: Sequence[SequenceState]) -> Sequence[SequenceState]:
        """Sequences of `ready` for which a token is left after each before them has taken one. A
        sequence for whose next page others were preempted may take from other shares."""
        if not self._kept:
            return ready[: self.tokens]
        total, common, kept = self.tokens, self.tokens - sum(self._kept), self._kept.copy()
        chosen: list[SequenceState] = []
        for sequence in ready:
            if total <= 0:
                break
            own = self._own(sequence)
            if _left(common, kept, own) <= 0 and sequence not in self._state.reserved_next_page:
                continue
            if own is not None and kept[own] > 0:
                kept[own] -= 1
            else:
                common -= 1
            total -= 1
            chosen.append(sequence)
        return chosen

    def take(self, sequences: Sequence[SequenceState], count: int) -> None:
        """Take `count` tokens for each of the sequences."""
        total = count * len(sequences)
        self.tokens -= total
        self.taken += total
        for sequence in sequences if self._kept else ():
            own = self._own(sequence)
            if own is not None:
                self._kept[own] -= min(count, self._kept[own])

    def _own(self, sequence: SequenceState) -> int | None:
        return self._share_of.get(sequence)


def _left(common: int, kept: Sequence[int], own: int | None) -> int:
    return common if own is None else common + kept[own]
