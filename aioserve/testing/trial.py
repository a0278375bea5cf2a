"""One policy on one workload: what `aioserve simulate`, `aioserve sweep` and `replay` have in
common, from options to metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.plugins import PluginRegistry
from aioserve.plugins.files import named_policy
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.simulation.machine import Machine, machine_of
from aioserve.simulation.metrics import Metrics, Targets, metrics_of
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Timeline
from aioserve.simulation.trial_options import TrialOptions
from aioserve.traces.checks import named
from aioserve.traces.request import TraceRequest
from aioserve.traces.workload import seed_draws, workload

__all__ = ["Trial", "targets_of"]


class Trial:
    """A workload and a machine that policies are tried on, one after the other.

    `source` is as in `workload`. Raises `ConfigError` and `TraceError` for what makes no sense, a
    seed that draws nothing included.
    """

    def __init__(
        self,
        source: str | Path | Sequence[TraceRequest],
        options: TrialOptions,
        registry: PluginRegistry | None = None,
    ) -> None:
        self.options = options
        self.registry: PluginRegistry = registry or PluginRegistry()
        with named("options"):
            self.targets: Targets | None = targets_of(options)
            self.machine: Machine = machine_of(options)
            draws = self.machine.scatter_seed is not None or seed_draws(
                source, arrivals=options.arrivals, predictor=options.predictor
            )
            if options.seed is not None and not draws:
                raise ConfigError(
                    "seed: nothing of a trace is drawn, and no step scatters, got "
                    f"{shown(options.seed)}"
                )
            self.requests: list[TraceRequest] = workload(
                source,
                num_requests=options.num_requests,
                arrivals=options.arrivals,
                rate=options.rate,
                seed=options.seed,
                closed_loop=options.closed_loop,
                scale_lengths=options.scale_lengths,
                predictor=options.predictor,
                priority=options.priority,
            )

    def run(
        self,
        policy: str | SchedulingPolicy,
        *,
        timeline: Timeline | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Tried:
        """Try one: a fresh object, or a name of which one is made."""
        options, machine = self.options, self.machine
        if isinstance(policy, str):
            policy = named_policy(self.registry, str.__str__(policy))
        eviction = options.eviction
        if isinstance(eviction, str):  # a new object for each run, like a policy
            eviction = self.registry.eviction(str.__str__(eviction))
        result = simulate(
            self.requests,
            policy,
            cost=machine.cost,
            num_pages=machine.num_pages,
            page_size=options.page_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            output_reserve_tokens=options.output_reserve_tokens,
            max_tokens=options.max_tokens,
            max_model_len=machine.max_model_len,
            prefix_caching=options.prefix_caching,
            eviction=eviction,
            overlap=options.overlap,
            num_host_pages=options.num_host_pages,
            preemption=options.preemption,
            closed_loop=options.closed_loop,
            ttft_target_seconds=options.ttft_target_seconds,
            tpot_target_seconds=options.tpot_target_seconds,
            scatter_seed=machine.scatter_seed,
            timeline=timeline,
            on_progress=on_progress,
        )
        return Tried(result, metrics_of(result, self.targets))


class Tried(NamedTuple):
    result: SimulationResult
    metrics: Metrics


def targets_of(options: TrialOptions) -> Targets | None:
    """Those that make goodput; None without any."""
    ttft, tpot = options.ttft_target_seconds, options.tpot_target_seconds
    if ttft is None and tpot is None:
        return None
    return Targets(ttft_seconds=ttft, tpot_seconds=tpot)
