"""Options of a simulated run, but for its policy: the one place of the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from aioserve.config import Preemption
from aioserve.kv.eviction import EvictionStrategy
from aioserve.simulation.cost import CostModel

__all__ = ["TrialOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """Options of a simulated run; those of `aioserve simulate` document each."""

    num_requests: int | None = None
    arrivals: str = "recorded"
    rate: float | None = None
    seed: int | None = None
    closed_loop: bool = False
    scale_lengths: float = 1.0
    predictor: str | None = None
    priority: tuple[str, ...] = ()
    cost: CostModel | None = None
    """Cost model in place of a model and its hardware, or of a table's file."""
    model: str | None = None
    hardware: str | None = None
    num_devices: int | None = None
    cost_table: str | None = None
    scatter: bool | None = None
    num_pages: int | None = None
    num_host_pages: int = 0
    unbounded_cache: bool = False
    page_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    output_reserve_tokens: int = 64
    max_tokens: int | None = None
    max_model_len: int | None = None
    prefix_caching: bool = True
    eviction: str | EvictionStrategy = "lru"
    preemption: Preemption = "auto"
    overlap: bool = True
    ttft_target_seconds: float | None = None
    tpot_target_seconds: float | None = None
