"""One policy on one trace, in a test: what `aioserve simulate` does on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from aioserve.config import Preemption
from aioserve.errors import ConfigError, TraceError
from aioserve.isolation import shown
from aioserve.kv.eviction import EvictionStrategy
from aioserve.plugins import check_policy_object
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.simulation.cost import CostModel
from aioserve.simulation.metrics import Metrics
from aioserve.simulation.request_rows import RequestFile, check_requests_file, is_same_file
from aioserve.simulation.timeline import Timeline
from aioserve.simulation.trial_options import TrialOptions
from aioserve.testing.trial import Trial
from aioserve.traces.request import TraceRequest
from aioserve.traces.synthetic import WORKLOADS

__all__ = ["replay"]


def replay(
    trace: str | Path | Sequence[TraceRequest],
    policy: str | SchedulingPolicy,
    *,
    num_requests: int | None = None,
    arrivals: str = "recorded",
    rate: float | None = None,
    seed: int | None = None,
    closed_loop: bool = False,
    scale_lengths: float = 1.0,
    predictor: str | None = None,
    priority: Sequence[str] = (),
    cost: CostModel | None = None,
    model: str | None = None,
    hardware: str | None = None,
    num_devices: int | None = None,
    cost_table: str | None = None,
    scatter: bool | None = None,
    num_pages: int | None = None,
    num_host_pages: int = 0,
    unbounded_cache: bool = False,
    page_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    output_reserve_tokens: int = 64,
    max_tokens: int | None = None,
    max_model_len: int | None = None,
    prefix_caching: bool = True,
    eviction: str | EvictionStrategy = "lru",
    preemption: Preemption = "auto",
    overlap: bool = True,
    ttft_target_seconds: float | None = None,
    tpot_target_seconds: float | None = None,
    requests: str | Path | None = None,
    timeline: Timeline | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Metrics:
    """Run a trace through the real scheduler on a virtual clock and measure it.

    trace: a file of any format that `aioserve simulate` reads, the name of one of its made-up
        workloads, or requests.
    policy: a fresh policy object, the name of one that is installed, or `FILE.py:CLASS`, options
        behind it.
    cost: how long a step takes, in place of what `model` and `hardware` or `cost_table` say.
    eviction: a strategy object, or the name of a strategy that is native or installed.
    requests: a file, `*.csv` or `*.jsonl`, that gets a line for each request.
    timeline: an empty one, which takes down every step.

    The others are the options of `aioserve simulate`, with the same defaults. With a target, which
    the policy sees of every request, the metrics have a goodput. Raises `TraceError` and
    `ConfigError`.
    """
    given = dict(locals())
    options = {name: given[name] for name in TrialOptions.__dataclass_fields__}
    if not isinstance(policy, str):
        policy = check_policy_object(policy)
    path = None if requests is None else check_requests_file(requests)
    source = _source(trace)
    if path is not None and isinstance(source, Path) and is_same_file(path, source):
        raise ConfigError(f"requests: {path} is the trace, which would be lost")
    trial = Trial(source, TrialOptions(**options))
    with nullcontext() if path is None else RequestFile(path) as file:
        result, metrics = trial.run(policy, timeline=timeline, on_progress=on_progress)
        if file is not None:
            file.add(result.requests, {})
    return metrics


def _source(trace: str | Path | Sequence[TraceRequest]) -> str | Path | Sequence[TraceRequest]:
    """A name of a made-up workload, or the path of a file, told apart."""
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
