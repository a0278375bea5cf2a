"""What exists between entering an engine and leaving it: scheduler, core loop, intake."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.engine.core import CoreLoop
from aioserve.engine.intake import Intake
from aioserve.engine.stats import EngineStats
from aioserve.errors import ConfigError, EngineClosedError, WrongLoopError
from aioserve.execution.runner import LoadedModel
from aioserve.kv.eviction import Eviction
from aioserve.kv.page_pool import PagePool
from aioserve.kv.pages import capacity_tokens
from aioserve.kv.prefix_tree import PrefixTree
from aioserve.plugins import Admission, Observers
from aioserve.scheduling.memory import KVMemory
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.sequence import SequenceState

__all__ = ["Chosen", "LiveEngine"]


class Chosen(msgspec.Struct, frozen=True):
    """What plugins give one engine: objects of its own."""

    policy: SchedulingPolicy
    policy_name: str | None
    """For logs and errors, with its distribution; None for an object, which goes by its class."""
    eviction: Eviction
    observers: Observers
    admission: Admission


class LiveEngine:
    """Made on the event loop that it serves."""

    def __init__(self, config: EngineConfig, chosen: Chosen, model: LoadedModel) -> None:
        self.config = config
        self.model = model
        self.loop = asyncio.get_running_loop()
        holds = capacity_tokens(model.limits.num_pages, config.page_size)
        if model.limits.max_model_len > holds:
            raise ConfigError(
                f"max_model_len of {model.name} is {model.limits.max_model_len}, but "
                f"{model.limits.num_pages} pages of {config.page_size} tokens hold {holds}"
            )
        self.memory = _kv_memory(config, chosen.eviction, model.limits.num_pages)
        self.scheduler = Scheduler(
            self.memory,
            chosen.policy,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            output_reserve_tokens=config.output_reserve_tokens,
            clock=self.loop.time,
            policy_name=chosen.policy_name,
        )
        self.core = CoreLoop(
            self.scheduler,
            model.runner,
            observers=chosen.observers,
            overlap=config.overlap,
            stall_timeout_seconds=config.stall_timeout_seconds,
        )
        self.intake = Intake(config, model, self.core, chosen.admission)
        self._task = self.loop.create_task(self.core.run(), name=f"aioserve {model.name}")

    def check(self) -> None:
        """Raise unless this is the engine's loop and the core loop works."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self.loop:
            raise WrongLoopError(
                "this engine was entered on another event loop; an engine belongs to one loop"
            )
        if self.core.failure is not None:
            raise EngineClosedError("the engine failed; see its log") from self.core.failure

    async def wait_idle(self) -> None:
        """Until no request is left."""
        await self.intake.wait_idle()
        await self.core.wait_idle()

    def abort_all(self, error: EngineClosedError) -> int:
        """End every request with `error`; how many there were."""
        return self.intake.abort_all(error) + self.core.abort_all(error)

    async def aclose(self) -> None:
        """End every request, let the steps in flight end, and stop the runner."""
        self.abort_all(EngineClosedError("the engine was closed before this request ended"))
        await self.intake.wait_idle()
        self.core.stop()
        await asyncio.wait([self._task])
        if isinstance(self.core.failure, KeyboardInterrupt | SystemExit):
            self._task.exception()  # retrieved: whoever runs the event loop has seen it
        await self.model.runner.aclose()

    def stats(self) -> EngineStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        memory, moved = self.memory, self.memory.counters
        pool, host_pool = memory.pool, memory.host_pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=self.intake.num_waiting,
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_fenced=pool.num_fenced,
            pages_cached=memory.num_cached,
            pages_held_by_requests=pool.num_held - memory.num_cached,
            pages_host_total=0 if host_pool is None else host_pool.num_pages,
            pages_host_used=0 if host_pool is None else host_pool.num_held,
            pages_copied_total=moved.pages_copied,
            pages_swapped_out_total=moved.pages_swapped_out,
            pages_swapped_in_total=moved.pages_swapped_in,
            tokens_prefilled_total=counters.tokens_prefilled,
            tokens_cached_total=moved.tokens_cached,
            tokens_generated_total=counters.tokens_generated,
            preemptions_total=counters.preemptions,
            steps_total=counters.steps,
            policy_faults_total=scheduler.guard.faults_total,
            step_age_seconds=self.core.step_age_seconds,
            loop_lag_seconds=max(self.model.runner.wake_delays_seconds, default=0.0),
        )

    def dump(self) -> dict[str, Any]:
        limits = msgspec.structs.asdict(self.model.limits)
        return {
            "model": {"name": self.model.name, **self.model.description},
            "limits": {**limits, "eos_token_ids": sorted(limits["eos_token_ids"])},
            "config": msgspec.structs.asdict(self.config),
            "policy": self.scheduler.guard.name,
            "observers": list(self.core.notices.observers.labels),
            "stats": msgspec.structs.asdict(self.stats()),
            "steps_in_flight": [
                {
                    "step": plan.step,
                    "sequences": len(plan.items),
                    "tokens": plan.num_tokens,
                    "copies": len(plan.copies),
                }
                for plan in self.core.in_flight
            ],
            "prefix_tree": _describe_tree(self.memory.tree),
            "sequences": [
                _describe_sequence(sequence, self.memory.pool)
                for sequence in self.scheduler.sequences.values()
            ],
        }


def _kv_memory(config: EngineConfig, eviction: Eviction, num_pages: int) -> KVMemory:
    host_pool = None
    if config.num_host_pages:
        host_pool = PagePool(config.num_host_pages, config.page_size)
    return KVMemory(
        PagePool(num_pages, config.page_size),
        host_pool=host_pool,
        prefix_caching=config.prefix_caching,
        partial_page_reuse=config.partial_page_reuse,
        eviction=eviction,
        preemption=config.preemption,
    )


def _describe_tree(tree: PrefixTree | None) -> dict[str, int] | None:
    if tree is None:
        return None
    return {
        "pages": tree.num_pages,
        "evictable_pages": tree.num_evictable,
        "locked_pages": tree.num_locked,
        "host_pages": tree.num_host_pages,
        "nodes": tree.num_nodes,
        "receipts": tree.num_receipts,
    }


def _describe_sequence(sequence: SequenceState, pool: PagePool) -> dict[str, Any]:
    pages = sequence.page_table.page_ids
    return {
        "request_id": sequence.request_id,
        "sequence_id": sequence.sequence_id,
        "seed": sequence.seed,
        "phase": sequence.phase.value,
        "paused": sequence.paused,
        "prompt_tokens": sequence.prompt_tokens,
        "known_tokens": sequence.num_known,
        "computed_tokens": sequence.computed,
        "cached_tokens": sequence.cached,
        "max_length": sequence.max_length,
        "pages": pages.tolist(),
        "shared_pages": len(pages) - pool.num_unshared(pages),
        "published_pages": sequence.published,
        "pages_on_host": 0 if sequence.swapped is None else len(sequence.swapped.host_page_ids),
        "preemptions": sequence.epoch,
    }
