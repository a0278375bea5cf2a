"""Account of one request: the time, tokens and preemptions of all its samples together.

The scheduler keeps it while it plans and preempts. It stays readable after the request has ended.
Times come from the caller of the scheduler: the account reads no clock.
"""

from __future__ import annotations

import msgspec

__all__ = ["RequestAccount"]


class RequestAccount(msgspec.Struct, gc=False):
    """Shared by all sequences of a request. Only their scheduler changes it."""

    started_seconds: float | None = None
    """Time when the first step with the request was planned, in seconds on the clock of the steps.
    None before."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix tree at the start. None before the start, and after a
    failed step destroyed them until the request starts anew."""
    found_by: int | None = None
    """Id of the sequence that found `cached_tokens`."""
    preemptions: int = 0
    device_seconds: float = 0.0
    """The request's shares of the seconds of finished steps, dropped items included."""
    drafted_tokens: int = 0
    """Draft tokens of the request that steps verified."""
    accepted_tokens: int = 0
    """Draft tokens that the target model drew as well: they became tokens of the samples."""

    def start(self, sequence_id: int, found_tokens: int, now_seconds: float) -> None:
        """Record the start of one of the request's sequences. Only the first start counts."""
        if self.started_seconds is None:
            self.started_seconds = now_seconds
        if self.cached_tokens is None:
            self.cached_tokens, self.found_by = found_tokens, sequence_id

    def lose_found(self, sequence_id: int) -> None:
        """Forget what a sequence without generated tokens had found in the prefix tree, because it
        is lost. Tokens found before a preemption still count."""
        if sequence_id == self.found_by and not self.preemptions:
            self.cached_tokens = None
