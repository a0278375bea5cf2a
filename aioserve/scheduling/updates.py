"""Results and counters that a scheduler reports."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.request import FinishReason, Logprobs

__all__ = ["SchedulerCounters", "SequenceUpdate"]


class SequenceUpdate(msgspec.Struct, frozen=True, gc=False):
    """News about one sequence: a token, an end, or both."""

    sequence_id: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Error message. For a rejected request the policy's reason, if it gave one."""
    rejected: bool = False
    """True if the policy refused the request."""
    retry_after_seconds: float | None = None
    """Seconds after which the policy might accept a rejected request, if it said so."""
    cause: Exception | None = None
    """Exception that ended the sequence while it was planned: a bug."""
    logprobs: Logprobs | None = None
    """Log-probabilities of the token, if the request asks for them."""
    scored: tuple[Logprobs, ...] = ()
    """Log-probabilities of prompt tokens, if the request asks for them. An update with these
    carries nothing else."""
    scored_before: int = 0
    """Number of earlier scored tokens that stay valid. Later ones are sent anew."""
    pooled: npt.NDArray[np.float64] | None = None
    """Sum of hidden states, float64 `[hidden]`, at the end of a sequence that asks for it."""
    forced: bool = False
    """True if the token was not drawn: the grammar leaves no other."""


class SchedulerCounters(msgspec.Struct):
    """Totals since the scheduler was made."""

    steps: int = 0
    tokens_processed: int = 0
    tokens_prefilled: int = 0
    """Prompt tokens computed, including those recomputed after a preemption."""
    tokens_cached: int = 0
    """Prompt tokens found in the prefix tree, including those found when a sequence begins
    again."""
    tokens_generated: int = 0
    preemptions: int = 0
    """Number of times that a sequence gave its pages to others, to begin again later."""
    drafted: list[int] = []
    """Verified draft tokens by place: entry 0 counts those right after a sequence's last token. The
    length is the largest number verified for one sequence in one step."""
    accepted: list[int] = []
    """Accepted draft tokens by place, as in `drafted`."""
