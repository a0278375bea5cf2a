"""`EngineStats`: an engine's numbers at one moment."""

from __future__ import annotations

from aioserve.kv.usage import KVUsage

__all__ = ["EngineStats"]


class EngineStats(KVUsage, frozen=True, kw_only=True, gc=False):
    """Numbers of one engine at one moment. `*_total` only grow.

    `pages_free + pages_fenced + pages_cached + pages_held_by_requests == pages_total`, always.
    """

    num_running: int
    """Sequences with pages of the KV cache: one for each sample of a request."""
    num_waiting: int
    """Requests that wait to start. Includes requests whose prompt is being encoded, and
    preempted ones."""
    tokens_prefilled_total: int
    """Prompt tokens computed, including those recomputed after a preemption."""
    tokens_cached_total: int
    """Prompt tokens taken from the prefix tree instead of being computed."""
    tokens_generated_total: int
    tokens_drafted_total: tuple[int, ...]
    """Draft tokens that steps verified, by position. Entry 0 counts those right after a
    sequence's last token. There is an entry for each position that was ever verified; empty
    without any."""
    tokens_accepted_total: tuple[int, ...]
    """Draft tokens among them that matched the step's own draw, by position. Includes those
    after the end of a completion."""
    preemptions_total: int
    steps_total: int
    step_seconds_total: float
    """Time in which a step was in flight."""
    planning_seconds_total: float
    """Time on the event loop to plan steps and hand them to the runner."""
    commit_seconds_total: float
    """Time on the event loop to take in the outcomes of steps."""
    delivery_seconds_total: float
    """Time on the event loop to make text of tokens and hand it to the streams. Excludes the
    time of their readers."""
    policy_faults_total: int
    """Steps in which the scheduling policy raised or returned an invalid answer."""
    drafter_faults_total: int
    """Calls in which the drafter raised or returned an invalid answer; 0 without speculation."""
    step_age_seconds: float
    """Time since the last completed step, or since work came, while work is pending. A measure
    of the engine's health; 0 when idle."""
    loop_lag_seconds: float
    """Longest recent delay between the end of a step and the event loop hearing of it."""
