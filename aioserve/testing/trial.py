"""One policy on one workload, from options to metrics: the common part of `aioserve simulate`,
`aioserve sweep` and `replay`, which does the same in a test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from aioserve.errors import ConfigError, TraceError
from aioserve.isolation import shown
from aioserve.kv.eviction import Eviction, EvictionStrategy
from aioserve.plugins import PluginRegistry, check_policy_object
from aioserve.plugins.files import named_policy
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.simulation.machine import Machine, machine_of
from aioserve.simulation.metrics import Metrics, Targets, metrics_of, targets_of
from aioserve.simulation.options import SchedulerOptions, TrialOptions, by_name
from aioserve.simulation.records import SimulationResult
from aioserve.simulation.request_rows import RequestFile, check_requests_file, is_same_file
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Timeline
from aioserve.traces.checks import named
from aioserve.traces.synthetic import WORKLOADS
from aioserve.traces.trace_request import TraceRequest
from aioserve.traces.workload import workload

__all__ = ["Trial", "replay"]


class Tried(NamedTuple):
    result: SimulationResult
    metrics: Metrics


class Trial:
    """A workload and a machine that policies are tried on, one after the other.

    `source` is as in `workload`. Raises `ConfigError` and `TraceError` for invalid options, and for
    a seed that draws nothing.
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
            self.machine: Machine = machine_of(options)
            self.draws: bool = (
                self.machine.noise_seed is not None
                or options.speculation_max_tokens != 0
                or options.draws(source)
            )
            """True if anything of it depends on a seed."""
            if options.seed is not None and not self.draws:
                raise ConfigError(
                    "seed: nothing of a trace is drawn, and no step varies, got "
                    f"{shown(options.seed)}"
                )
            self.requests: list[TraceRequest] = workload(source, options)
            self.targets: Targets | None = targets_of(self.requests)
            """Targets that define goodput; None without any."""

    def eviction(self) -> Eviction:
        """Make the strategy, a new object for each run, like a policy."""
        given = self.options.eviction
        return self.registry.eviction(str.__str__(given)) if isinstance(given, str) else given

    def run(
        self,
        policy: str | SchedulingPolicy,
        *,
        timeline: Timeline | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Tried:
        """Try a policy: a fresh object, or a name of which one is made."""
        options, machine = self.options, self.machine
        if isinstance(policy, str):
            policy = named_policy(self.registry, str.__str__(policy))
        given = {one.name: getattr(options, one.name) for one in fields(SchedulerOptions)}
        given |= {
            "num_pages": machine.num_pages,
            "max_model_len": machine.max_model_len,
            "num_window_groups": machine.num_window_groups,
            "window": machine.window,
            "eviction": self.eviction(),
        }
        result = simulate(
            self.requests,
            policy,
            **given,
            cost=machine.cost,
            closed_loop=options.closed_loop,
            noise_seed=machine.noise_seed,
            acceptance_seed=options.seed or 0,
            timeline=timeline,
            on_progress=on_progress,
        )
        return Tried(result, metrics_of(result))


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(TrialOptions):
    """Options of `replay`: those of a trial, and outputs."""

    eviction: str | EvictionStrategy = "lru"
    requests: str | Path | None = None
    timeline: Timeline | None = None
    on_progress: Callable[[int, int], None] | None = None


@by_name(ReplayOptions)
def replay(
    trace: str | Path | Sequence[TraceRequest],
    policy: str | SchedulingPolicy,
    options: ReplayOptions,
) -> Metrics:
    """Run a trace through the real scheduler on a virtual clock and measure it.

    - `trace` is a file of any format that `aioserve simulate` reads, the name of one of its made-up
      workloads, or requests.
    - `policy` is a fresh policy object, the name of an installed one, or `FILE.py:CLASS`, with
      options after it.
    - `cost` is the time of steps, in place of `model` and `hardware` or `cost_table`.
    - `eviction` is a strategy object, or the name of a strategy that is native or installed.
    - `requests` is a file, `*.csv` or `*.jsonl`, that gets a line for each request.
    - `timeline`, an empty one, records every step.

    The others are the options of `aioserve simulate`, with the same defaults. With targets, which
    the policy sees of the requests that have them, the metrics have a goodput. Raises `TraceError`
    and `ConfigError`.
    """
    if not isinstance(policy, str):
        policy = check_policy_object(policy)
    path = None if options.requests is None else check_requests_file(options.requests)
    source = _source(trace)
    if path is not None and isinstance(source, Path) and is_same_file(path, source):
        raise ConfigError(f"requests: {path} is the trace, which would be lost")
    trial = Trial(source, options)
    with nullcontext() if path is None else RequestFile(path) as file:
        result, metrics = trial.run(
            policy, timeline=options.timeline, on_progress=options.on_progress
        )
        if file is not None:
            file.add(result.requests, {})
    return metrics


def _source(trace: str | Path | Sequence[TraceRequest]) -> str | Path | Sequence[TraceRequest]:
    """Return the name of a made-up workload, or the path of a file."""
    if not isinstance(trace, str):
        return trace
    name = str.__str__(trace)
    if name in WORKLOADS:
        return name
    if not os.path.exists(name):
        raise TraceError(
            f"no trace file {shown(name)}, and no made-up workload of that name; there are: "
            f"{', '.join(WORKLOADS)}"
        )
    return Path(name)
