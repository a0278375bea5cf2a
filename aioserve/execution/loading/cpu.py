"""Places models on the CPU: memory of the host, and one thread for steps.

Imports torch; `imports` makes that happen off the event loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from aioserve.config import EngineConfig
from aioserve.execution.cpu_worker import CpuWorker
from aioserve.execution.host import Host
from aioserve.execution.loading.place import Allocated, Placement, RunnerOptions, SparePages
from aioserve.execution.process_memory import available_memory_bytes
from aioserve.execution.reserve import reserve
from aioserve.execution.speculation.branches import ScratchPages, scratch_pages
from aioserve.execution.speculation.drafts.computed_drafter import ComputedDrafter
from aioserve.execution.speculation.drafts.placing import Draft, draft_of, rejects
from aioserve.execution.speculation.drafts.read import AnyReadDraft
from aioserve.execution.speculation.verification import RejectionSampling
from aioserve.execution.step_thread_runner import StepThreadRunner
from aioserve.models.decoder import Decoder
from aioserve.models.loader import make_decoder
from aioserve.models.reading import ReadWeights
from aioserve.ops import KVCache, backend_named
from aioserve.paging.pages import pages_for

__all__ = ["CpuPlacement"]

PREFAULT_STEPS = 4
"""Largest steps whose KV memory is provided before they come, ..."""
PREFAULT_BYTES = 2**30
"""... within this limit. The last piece may exceed it."""


class CpuPlacement(Placement[CpuWorker, StepThreadRunner]):
    """Placement on the backend that options name."""

    def load(
        self, weights: ReadWeights, config: EngineConfig, kept_layers: Sequence[int] = ()
    ) -> Decoder:
        backend, program = backend_named(config.backend), config.step_program
        return make_decoder(weights, backend, use_program=program, kept_layers=kept_layers)

    def load_draft(self, read: AnyReadDraft, target: Decoder, config: EngineConfig) -> Draft:
        return draft_of(read, target, config)

    def spare_pages(self, decoder: Decoder, config: EngineConfig) -> SparePages:
        """Count the pages that branches are computed in."""
        if (speculation := config.speculation) is None:
            return SparePages(0)
        max_branches = speculation.max_branches
        count = scratch_pages(
            max_branches,
            speculation.max_tokens,
            config.max_num_seqs,
            config.page_size,
            decoder.layout.num_groups,
        )
        return SparePages(count, max_branches)

    def measure(
        self, decoder: Decoder, config: EngineConfig, draft: Draft | None, num_slots: int
    ) -> int:
        """Return the bytes for KV pages. Host pages take memory of this machine, too."""
        budget = int(available_memory_bytes() * config.memory_utilization)
        one = decoder.kv_shape(1, config.page_size).bytes_per_page
        budget -= self.spare_pages(decoder, config).count * one
        return budget - config.num_host_pages * (one + (draft.bytes_per_host_page if draft else 0))

    def new_cache(self, decoder: Decoder, config: EngineConfig, num_pages: int) -> KVCache:
        spare = self.spare_pages(decoder, config)
        size, count = config.page_size, num_pages + spare.count
        allocate = functools.partial(decoder.new_cache, count, size)
        return reserve("num_pages", num_pages, allocate, beside=str(spare))

    def place_draft(self, draft: Draft, num_pages: int, num_slots: int) -> ComputedDrafter:
        drafter = draft.placed(num_pages, num_slots=num_slots)
        draft.draft_with(drafter)
        return drafter

    def worker_of(self, model: Allocated, config: EngineConfig, num_slots: int) -> CpuWorker:
        drafter, verification = model.drafter, None
        if drafter is not None and rejects(config):
            verification = RejectionSampling(model.decoder.backend, drafter)
        return CpuWorker(
            model.decoder,
            model.cache,
            model.host_cache,
            num_slots=num_slots,
            num_pages=model.num_pages,
            prefault_pages=_prefault_pages(model.cache, config),
            verification=verification,
        )

    def start_of(
        self, worker: CpuWorker, model: Allocated, options: RunnerOptions
    ) -> Callable[[], StepThreadRunner]:
        cache, num_pages = model.cache, model.num_pages
        host = Host(
            cache.page_size,
            options.num_slots,
            cache.layout.num_groups,
            options.processors,
            follower=model.drafter,
            max_branches=model.spare.max_branches,
            scratch=ScratchPages(num_pages, num_pages + model.spare.scratch),
        )
        return functools.partial(StepThreadRunner, host, worker, name=options.name)


def _prefault_pages(cache: KVCache, config: EngineConfig) -> int:
    steps = pages_for(PREFAULT_STEPS * config.max_num_batched_tokens, config.page_size)
    return min(steps, PREFAULT_BYTES // cache.bytes_per_page)
