"""Reports of an engine on itself: numbers for dashboards, and all state for debugging."""

from __future__ import annotations

from typing import Any

import msgspec

from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.stats import EngineStats
from aioserve.execution.runner import LoadedModel
from aioserve.scheduling.report import describe

__all__ = ["described", "dump_of", "stats_of"]


def stats_of(engine: EngineLifecycle) -> EngineStats:
    scheduler, counters, times = engine.scheduler, engine.scheduler.counters, engine.core.times
    table, usage, config = engine.core.table, scheduler.memory.usage(), engine.config
    held = usage.pages_held_by_requests * scheduler.memory.page_size
    latency, variance = table.ended_requests.latency()
    prefill, decode = engine.core.work.phases(
        config.peak_flops_per_second, config.peak_bytes_per_second
    )
    return EngineStats(
        **msgspec.structs.asdict(usage),
        requests_finished_total=dict(table.ended_requests.counts),
        slots_held_by_requests=held,
        slots_filled=held - scheduler.num_empty_slots,
        tokens_computed_total=prefill.tokens_total + decode.tokens_total,
        prefill=prefill,
        decode=decode,
        latency_mean_seconds=latency,
        latency_variance_square_seconds=variance,
        service_gap_seconds=table.ended_requests.service_gap(table.served()),
        num_running=scheduler.num_running,
        num_waiting=engine.core.num_waiting,
        tokens_prefilled_total=counters.tokens_prefilled,
        tokens_cached_total=counters.tokens_cached,
        tokens_generated_total=counters.tokens_generated,
        tokens_drafted_total=tuple(counters.drafted),
        tokens_accepted_total=tuple(counters.accepted),
        preemptions_total=counters.preemptions,
        steps_total=counters.steps,
        step_seconds_total=times.step_seconds,
        planning_seconds_total=times.planning_seconds,
        commit_seconds_total=times.commit_seconds,
        delivery_seconds_total=times.delivery_seconds,
        policy_faults_total=scheduler.policy_calls.faults_total,
        drafter_faults_total=0 if engine.drafter is None else engine.drafter.faults_total,
        step_age_seconds=engine.core.step_age_seconds,
        loop_lag_seconds=max(engine.model.runner.wake_delays_seconds, default=0.0),
    )


def dump_of(engine: EngineLifecycle) -> dict[str, Any]:
    limits = msgspec.structs.asdict(engine.model.limits)
    return {
        "model": described(engine.model),
        "limits": {**limits, "eos_token_ids": sorted(limits["eos_token_ids"])},
        "config": msgspec.to_builtins(engine.config),
        "policy": engine.scheduler.policy_calls.name,
        "observers": list(engine.core.observer_events.observers.labels),
        "stats": msgspec.to_builtins(stats_of(engine)),
        "steps_in_flight": [
            {
                "step": plan.step,
                "sequences": plan.num_sequences,
                "tokens": plan.num_tokens,
                "copies": len(plan.copies),
            }
            for plan in engine.core.pipeline.in_flight
        ],
        **describe(engine.scheduler),
    }


def described(model: LoadedModel) -> dict[str, Any]:
    return {"name": model.name, **model.description}
