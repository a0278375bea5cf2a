"""`EngineStats`: an engine's numbers at one moment."""

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
    tokens_drafted_total: tuple[int, ...]
    """Draft tokens of the drafter that steps verified, by their place: entry 0 counts those that
    came right behind a sequence's last token. It has an entry for each place that a step has
    verified; empty without any."""
    tokens_accepted_total: tuple[int, ...]
    """Draft tokens among them that were what the step itself drew, those behind the end of a
    completion included; likewise."""
    preemptions_total: int
    steps_total: int
    step_seconds_total: float
    """Time in which a step was in flight."""
    planning_seconds_total: float
    """Time on the event loop that went into planning steps and handing them to the runner."""
    commit_seconds_total: float
    """Time on the event loop that went into taking in what steps brought."""
    delivery_seconds_total: float
    """Time on the event loop that went into making text of it and handing that to the streams. What
    their readers then do with it isn't counted."""
    policy_faults_total: int
    """Steps in which the scheduling policy raised or gave an answer that isn't one."""
    drafter_faults_total: int
    """Calls in which the drafter raised or gave an answer that isn't one; 0 without speculation."""
    step_age_seconds: float
    """While work is pending, since the last completed step (or since the work came): the engine's
    health. 0 when idle."""
    loop_lag_seconds: float
    """Longest recent delay between the end of a step and the event loop hearing of it."""
