"""`EngineStats`: an engine's numbers at one moment."""

from __future__ import annotations

from collections.abc import Mapping

from aioserve.engine.step_work import PhaseStats
from aioserve.kv.usage import KVUsage

__all__ = ["EngineStats", "PhaseStats"]


class EngineStats(KVUsage, frozen=True, kw_only=True, gc=False):
    """Numbers of one engine at one moment. `*_total` only grow.

    `pages_free + pages_fenced + pages_cached + pages_held_by_requests == pages_total`, always.
    """

    num_running: int
    """Sequences with pages of the KV cache: one for each sample of a request."""
    num_waiting: int
    """Requests that wait to start. Includes requests whose prompt is being encoded, and
    preempted ones."""
    requests_finished_total: Mapping[str, int]
    """Requests that have ended, by the reason: "stop", "length", "abort" and "error". Excludes
    those that the engine refused at once."""
    slots_held_by_requests: int
    """Token slots of `pages_held_by_requests`: each page has one for each token of a page."""
    slots_filled: int
    """Slots among them with keys and values of a token, once the steps in flight are done. The
    rest is internal fragmentation."""
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
    tokens_computed_total: int
    """Tokens of all steps that brought an outcome, draft tokens included:
    `prefill.tokens_total + decode.tokens_total`."""
    prefill: PhaseStats
    """Work on tokens known before their step: prompts, recomputed and forced tokens."""
    decode: PhaseStats
    """Work on the last tokens of sequences, and on draft tokens."""
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
    latency_mean_seconds: float | None
    """Mean time from submission to the end, of the last 512 requests, without those that ended
    with "abort" or "error". None without any."""
    latency_variance_square_seconds: float | None
    """Variance of these times, in square seconds. None without any."""
    service_gap_seconds: float | None
    """Largest difference in device seconds between two tenants. A tenant's device seconds are
    those of its open requests and of its requests among the last 512 that ended. None for fewer
    than two tenants."""

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step computes; 0 before the first step."""
        return self.tokens_computed_total / self.steps_total if self.steps_total else 0.0

    @property
    def fill_ratio(self) -> float | None:
        """Share of the requests' page capacity that holds tokens, in 0 to 1. None while requests
        hold no page."""
        held = self.slots_held_by_requests
        return self.slots_filled / held if held else None
