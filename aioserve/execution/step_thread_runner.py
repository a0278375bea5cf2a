"""Runs steps of a decoder in one step thread, on whatever backend the decoder has."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

import torch

from aioserve.drafting.drafter import Drafter
from aioserve.execution.batch import PlanReader, StepArrays, UnresolvedStep
from aioserve.execution.prefault import Prefault
from aioserve.execution.speculation.branches import BranchedStep, ScratchPages
from aioserve.execution.speculation.resolver import Resolver, StepFollower
from aioserve.execution.speculation.verification import SamplerMatch, Verification
from aioserve.execution.step_thread import StepThread
from aioserve.models.decoder import Decoder
from aioserve.ops import KVCache
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["StepThreadRunner"]


class StepThreadRunner:
    """Owns the model's KV storage. Made on the event loop that will await its steps.

    `host_cache` is where pages are copied to and from "the host": here it is the same memory.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        *,
        num_slots: int,
        name: str,
        host_cache: KVCache | None = None,
        prefault_pages: int = 0,
        processors: Sequence[Callable[[str], Any]] = (),
        follower: StepFollower | None = None,
        verification: Verification | None = None,
        max_branches: int = 0,
        scratch_pages: int = 0,
    ) -> None:
        """`prefault_pages`: of `cache`, as many past those in use have their memory before they
        are needed, from times when no step runs. `processors` are as `PlanReader` has them.
        `follower` hears of every plan on the step thread. `verification` says which guesses are
        kept; None: by sampler match. `max_branches`: most paths beside the guesses of a sequence,
        which are computed in the last pages of `cache`, `scratch_pages` of them."""
        self._model = model
        self._cache = cache
        self._caches = (cache,) if host_cache is None else (cache, host_cache)
        self._reader = PlanReader(
            cache.page_size, num_slots, processors, num_groups=cache.layout.num_groups
        )
        # Token ids stay here between steps: the next step may be launched before the host has
        # seen them. One writer and one reader, both on the step thread.
        self._last_tokens = model.backend.allocate_slots(num_slots + 1)  # and `spare_slot`
        pool = cache.num_pages - scratch_pages
        self._prefault = Prefault(cache, prefault_pages, num_pages=pool)
        self._follower = follower
        self._resolver = Resolver(None, follower)
        self._max_branches = max_branches
        self._scratch = ScratchPages(pool, cache.num_pages)
        self._verification = verification or SamplerMatch(model.backend)
        self._thread: StepThread[StepOutcome] = StepThread(
            f"aioserve-{name}", torch.inference_mode, idle=self._prefault.advance
        )

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return self._thread.wake_delays_seconds

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        """Its arrays are made here, while the step before is computed."""
        try:
            step = self._reader.read_open(plan, masks)
        except Exception as error:
            return self._thread.submit(functools.partial(self._fail, plan, error))
        return self._thread.submit(functools.partial(self._step, plan, step))

    def take_drafter(self, drafter: Drafter) -> None:
        """Let a drafter make the guesses that plans ask for. To be called before the first."""
        self._resolver = Resolver(
            drafter, self._follower, time.perf_counter, max_branches=self._max_branches
        )

    async def aclose(self) -> None:
        await self._thread.aclose()

    def _fail(self, plan: StepPlan, error: Exception) -> NoReturn:
        self._resolver.take(plan)
        raise error

    def _step(self, plan: StepPlan, read: StepArrays | UnresolvedStep) -> StepOutcome:
        resolver = self._resolver
        if resolver.is_used:
            resolver.take(plan)
        if len(read.copies):
            self._thread.tell_loop()
            self._model.backend.copy_pages(self._caches, read.copies)
        if resolver.is_used or plan.num_verified:
            plan = resolver.resolved(plan)
        if not plan.items:
            return StepOutcome(step=plan.step, token_ids=())
        if not isinstance(read, UnresolvedStep):
            return self._noted(plan, read)
        if resolver.branches:
            branched = self._scratch.branched(plan, read, resolver.branches)
            if branched is not None:
                return self._branched(branched)
        return self._noted(plan, read.resolved(plan))

    def _noted(self, plan: StepPlan, step: StepArrays) -> StepOutcome:
        outcome, batch = self._computed(step), step.batch
        if not self._resolver.is_used:
            return outcome
        locations = None if batch is None else batch.token_locations[0]
        return self._resolver.noted(plan, outcome, locations=locations)

    def _branched(self, branched: BranchedStep) -> StepOutcome:
        copy_pages = self._model.backend.copy_pages
        if len(branched.copies):
            copy_pages(self._caches, branched.copies)
        outcome = self._computed(branched.read.resolved(branched.plan))
        plan, rows, copies = branched.drawn(outcome)
        if len(copies):
            copy_pages(self._caches, copies)
        return self._resolver.noted(plan, outcome, rows)

    def _computed(self, step: StepArrays) -> StepOutcome:
        backend = self._model.backend
        if step.batch is None:
            return StepOutcome(step=step.step, token_ids=())
        self._prefault.note_writes(step.batch.token_locations)
        batch = backend.prepare(step.batch, self._cache, self._last_tokens)
        # torch lets go of the GIL while it makes a tensor. From here on the loop takes it then.
        self._model.make_room(len(batch.token_ids))
        self._thread.tell_loop()
        extras, pooled = step.extras, ()
        drawn_at_once = not step.pooled and (extras is None or extras.logprobs is None)
        if drawn_at_once and not self._verification.reads_logits(step):
            edits = None if extras is None else extras.edits
            drawn = self._model.draw(batch, self._cache, step.samples, self._last_tokens, edits)
            if edits is not None:
                edits.note(drawn.token_ids)
            return step.outcome(drawn.token_ids.tolist(), drawn.row_errors)
        if step.pooled:
            logits, sums = self._model.forward_pooled(batch, self._cache, step.pooled)
            pooled = sums.numpy()
        else:
            logits = self._model.forward(batch, self._cache)
        if extras is None:
            drawn = self._verification.draw(logits, step, self._last_tokens)
            return step.outcome(drawn.token_ids.tolist(), drawn.row_errors, pooled=pooled)
        asked = extras.before_draw(logits, len(step.samples))
        drawn = self._verification.draw(asked.sampled, step, self._last_tokens)
        asked.after_draw(drawn.token_ids)
        top = asked.most_likely
        most_likely = None if top is None else (top.values.numpy(), top.ids.numpy())
        return step.outcome(drawn.token_ids.tolist(), drawn.row_errors, most_likely, pooled)
