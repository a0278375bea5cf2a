"""The numbers that an engine publishes."""

from __future__ import annotations

import msgspec

__all__ = ["EngineStats"]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of one engine. `*_total` only grow.

    `pages_free + pages_fenced + pages_cached + pages_held_by_requests == pages_total`, always.
    """

    num_running: int
    """Sequences with pages of the KV cache: one for each sample of a request."""
    num_waiting: int
    """Requests that wait to start, those whose prompt is being encoded and those that were
    preempted included."""
    pages_total: int
    pages_free: int
    pages_fenced: int
    """Given back, and free as soon as the step in flight is done."""
    pages_cached: int
    """Held by the prefix tree alone: evicted when somebody needs pages."""
    pages_held_by_requests: int
    """A page that several share counts once."""
    pages_host_total: int
    """Pages of the host pool (`num_host_pages`)."""
    pages_host_used: int
    """Pages of the host pool that hold evicted cached pages or swapped-out requests."""
    pages_copied_total: int
    """Pages copied on the device: shared ones before they are written, and cached ones in part."""
    pages_swapped_out_total: int
    """Pages copied to the host pool."""
    pages_swapped_in_total: int
    """Pages copied back."""
    tokens_prefilled_total: int
    """Prompt tokens computed, those computed again after a preemption included."""
    tokens_cached_total: int
    """Prompt tokens taken from the prefix tree instead."""
    tokens_generated_total: int
    preemptions_total: int
    steps_total: int
    policy_faults_total: int
    """Steps in which the scheduling policy raised or gave an answer that isn't one."""
    step_age_seconds: float
    """While work is pending, since the last completed step (or since the work came): the engine's
    health. 0 when idle."""
    loop_lag_seconds: float
    """Longest recent delay between the end of a step and the event loop hearing of it."""
