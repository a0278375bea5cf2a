"""What an engine tells of itself: numbers for dashboards, and everything for debugging."""

from __future__ import annotations

from typing import Any

import msgspec

from aioserve.engine.live import LiveEngine
from aioserve.engine.stats import EngineStats
from aioserve.scheduling.report import describe

__all__ = ["dump_of", "stats_of"]


def stats_of(live: LiveEngine) -> EngineStats:
    scheduler, counters, times = live.scheduler, live.scheduler.counters, live.core.times
    return EngineStats(
        **msgspec.structs.asdict(scheduler.memory.usage()),
        num_running=scheduler.num_running,
        num_waiting=live.core.num_waiting,
        tokens_prefilled_total=counters.tokens_prefilled,
        tokens_cached_total=counters.tokens_cached,
        tokens_generated_total=counters.tokens_generated,
        preemptions_total=counters.preemptions,
        steps_total=counters.steps,
        step_seconds_total=times.step_seconds,
        planning_seconds_total=times.planning_seconds,
        commit_seconds_total=times.commit_seconds,
        delivery_seconds_total=times.delivery_seconds,
        policy_faults_total=scheduler.policy_calls.faults_total,
        step_age_seconds=live.core.step_age_seconds,
        loop_lag_seconds=max(live.model.runner.wake_delays_seconds, default=0.0),
    )


def dump_of(live: LiveEngine) -> dict[str, Any]:
    limits = msgspec.structs.asdict(live.model.limits)
    return {
        "model": {"name": live.model.name, **live.model.description},
        "limits": {**limits, "eos_token_ids": sorted(limits["eos_token_ids"])},
        "config": msgspec.structs.asdict(live.config),
        "policy": live.scheduler.policy_calls.name,
        "observers": list(live.core.notices.observers.labels),
        "stats": msgspec.structs.asdict(stats_of(live)),
        "steps_in_flight": [
            {
                "step": plan.step,
                "sequences": plan.num_sequences,
                "tokens": plan.num_tokens,
                "copies": len(plan.copies),
            }
            for plan in live.core.pipeline.in_flight
        ],
        **describe(live.scheduler),
    }
