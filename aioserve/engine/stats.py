"""The numbers that an engine publishes."""

from __future__ import annotations

from aioserve.kv.usage import KVUsage

__all__ = ["EngineStats"]


class EngineStats(KVUsage, frozen=True, kw_only=True, gc=False):
    """One moment of one engine. `*_total` only grow.

    `pages_free + pages_fenced + pages_cached + pages_held_by_requests == pages_total`, always.
    """

    num_running: int
    """Sequences with pages of the KV cache: one for each sample of a request."""
    num_waiting: int
    """Requests that wait to start, those whose prompt is being encoded and those that were
    preempted included."""
    tokens_prefilled_total: int
    """Prompt tokens computed, those computed again after a preemption included."""
    tokens_cached_total: int
    """Prompt tokens taken from the prefix tree instead."""
    tokens_generated_total: int
    preemptions_total: int
    steps_total: int
    step_seconds_total: float
    """Time in which a step was in flight."""
    planning_seconds_total: float
    """Of the event loop's time, what went into planning steps and handing them to the runner."""
    commit_seconds_total: float
    """Likewise, into taking in what steps brought."""
    delivery_seconds_total: float
    """Likewise, into making text of it and handing that to the streams. What their readers then do
    with it isn't counted."""
    policy_faults_total: int
    """Steps in which the scheduling policy raised or gave an answer that isn't one."""
    step_age_seconds: float
    """While work is pending, since the last completed step (or since the work came): the engine's
    health. 0 when idle."""
    loop_lag_seconds: float
    """Longest recent delay between the end of a step and the event loop hearing of it."""
