"""What one request has had of the engine so far: all its samples together.

Kept by the scheduler while it plans and preempts; read by what answers the request, also after
its end. Knows no clock: times are those that the scheduler was given.
"""

from __future__ import annotations

import msgspec

__all__ = ["RequestAccount"]


class RequestAccount(msgspec.Struct, gc=False):
    """One object for all sequences of a request, and changed by their scheduler alone."""

    started_seconds: float | None = None
    """When the first step with it was planned, on the clock of the steps; None before."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix tree when it started; None before, and while it has to
    start anew because what it found was lost with a failed step."""
    found_by: int | None = None
    """Id of the sequence that found them."""
    preemptions: int = 0
    device_seconds: float = 0.0
    """Its shares of the time of steps that are done, those of its items that were dropped
    included."""
    drafted_tokens: int = 0
    """Draft tokens of its own that steps verified."""
    accepted_tokens: int = 0
    """Draft tokens that the step itself drew: they are tokens of its samples."""

    def start(self, sequence_id: int, found_tokens: int, now_seconds: float) -> None:
        """A step is planned in which one of its sequences starts: only the first time counts."""
        if self.started_seconds is None:
            self.started_seconds = now_seconds
        if self.cached_tokens is None:
            self.cached_tokens, self.found_by = found_tokens, sequence_id

    def lose_found(self, sequence_id: int) -> None:
        """A sequence without a token starts anew, since what it found in the prefix tree is worth
        nothing. What it had found before it was preempted was worth something."""
        if sequence_id == self.found_by and not self.preemptions:
            self.cached_tokens = None
