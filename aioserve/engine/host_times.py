"""What steps take, and what the engine itself takes of it on the event loop's thread."""

from __future__ import annotations

import msgspec

__all__ = ["HostTimes"]


class HostTimes(msgspec.Struct):
    """Totals of one core loop, on the clock of its event loop.

             plan, launch        commit, deliver
    loop     [ step 8 ]..........[ step 7 ][ plan, launch step 9 ]....
    steps    ──── step 7 ───────►────────── step 8 ──────────────────►
    """

    planning_seconds: float = 0.0
    """Planning steps and handing them to the runner."""
    commit_seconds: float = 0.0
    """Taking in what steps brought."""
    delivery_seconds: float = 0.0
    """Making text of it and putting it into the readers' mailboxes."""
    step_seconds: float = 0.0
    """At least one step was in flight, as far as the loop had heard."""
