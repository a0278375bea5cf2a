"""What a scheduler tells of its sequences, and counts."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.request import FinishReason, Logprobs

__all__ = ["SchedulerCounters", "SequenceUpdate"]


class SequenceUpdate(msgspec.Struct, frozen=True, gc=False):
    """What is told of one sequence: a token, an end, or both."""

    sequence_id: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    """What went wrong; of a rejected request the policy's reason, where it gave one."""
    rejected: bool = False
    """The policy refused the request."""
    retry_after_seconds: float | None = None
    """When the policy might take a rejected request, where it said so."""
    cause: Exception | None = None
    """What was raised while the sequence was planned, where that ended it: a bug."""
    logprobs: Logprobs | None = None
    """Log-probabilities of the token, where the request asks for them."""
    scored: tuple[Logprobs, ...] = ()
    """Log-probabilities of prompt tokens, where it asks for these: the update tells of no more."""
    scored_before: int = 0
    """How many of those that were told before stand; others are told anew."""
    pooled: npt.NDArray[np.float64] | None = None
    """The sum of hidden states, float64 `[hidden]`, at the end of a sequence that asks for it."""
    forced: bool = False
    """The token wasn't drawn: the form of the answer leaves no other."""


class SchedulerCounters(msgspec.Struct):
    """Totals since the scheduler was made."""

    steps: int = 0
    tokens_processed: int = 0
    tokens_prefilled: int = 0
    """Prompt tokens computed, those recomputed after a preemption included."""
    tokens_cached: int = 0
    """Prompt tokens found in the prefix tree instead, also when a sequence begins again."""
    tokens_generated: int = 0
    preemptions: int = 0
    """Times that a sequence gave its pages to others, to begin again later."""
    drafted: list[int] = []
    """Draft tokens that steps verified, by their place: entry 0 counts those right behind a
    sequence's last token. As long as the most of a sequence that a step has verified."""
    accepted: list[int] = []
    """Draft tokens among them that were right, likewise."""
