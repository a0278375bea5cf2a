"""Worker of the CPU: it copies pages and computes a step before it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioserve.execution.prefault import Prefault
from aioserve.execution.speculation.verification import SamplerMatch, Verification
from aioserve.execution.step_arrays import StepArrays
from aioserve.models.decoder import Decoder
from aioserve.ops import KVCache
from aioserve.steps.outcome import StepOutcome

__all__ = ["CpuWorker"]


@dataclass(slots=True)
class _Computed:
    """A `PendingStep` that has ended."""

    of: StepOutcome

    def outcome(self) -> StepOutcome:
        return self.of


class CpuWorker:
    """A `Worker` on the step thread, inside `torch.inference_mode`."""

    max_in_flight: int = 1

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        host_cache: KVCache | None = None,
        *,
        num_slots: int,
        num_pages: int | None = None,
        prefault_pages: int = 0,
        verification: Verification | None = None,
    ) -> None:
        """Hold the model and its memory.

        - `host_cache`: pages of "the host", which here is the same memory.
        - `num_pages`: the first pages of `cache`, which are the pool; None means all.
        - `prefault_pages`: pages past those in use whose memory is provided ahead of time.
        - `verification`: the rule for draft tokens; None means sampler match.
        """
        self._model = model
        self._cache = cache
        self._caches = (cache,) if host_cache is None else (cache, host_cache)
        # Token ids stay here between steps: the next step may be launched before the host has seen
        # them.
        self._last_tokens = model.backend.allocate_slots(num_slots + 1)  # and `spare_slot`
        self._prefault = Prefault(cache, prefault_pages, num_pages=num_pages)
        self._verification = verification or SamplerMatch(model.backend)
        self.idle: Callable[[], bool] = self._prefault.advance
        """Do a piece of work while no step runs; False if there was none."""
        self.leave_python: Callable[[], None] = lambda: None
        """Callback before a step goes on in compiled code for a while. Set by the worker's
        runner."""

    def copy(self, copies: npt.NDArray[np.int32]) -> None:
        self.leave_python()
        self._model.backend.copy_pages(self._caches, copies)

    def step(self, block: StepArrays) -> _Computed:
        if len(block.copies):
            self.copy(block.copies)
        model, batch = self._model, block.batch
        if batch is None:
            return _Computed(StepOutcome(step=block.step, token_ids=()))
        self._prefault.note_writes(batch.token_locations)
        batch = model.backend.prepare(batch, self._cache, self._last_tokens)
        # torch releases the GIL while it makes a tensor, and the loop, once told, takes it. So make
        # room before telling the loop.
        model.make_room(len(batch.token_ids))
        self.leave_python()
        extras, pooled = block.extras, ()
        reads_logits = block.verified is not None and self._verification.reads_logits(block)
        drawn_at_once = not block.pooled and (extras is None or extras.logprobs is None)
        if drawn_at_once and not reads_logits:
            edits = None if extras is None else extras.edits
            drawn = model.draw(batch, self._cache, block.samples, self._last_tokens, edits)
            if edits is not None:
                edits.note(drawn.token_ids)
            return _Computed(block.outcome(drawn.token_ids.tolist(), drawn.row_errors))
        if block.pooled:
            logits, sums = model.forward_pooled(batch, self._cache, block.pooled)
            pooled = sums.numpy()
        else:
            logits = model.forward(batch, self._cache)
        if extras is None:
            drawn = self._verification.draw(logits, block, self._last_tokens)
            token_ids = drawn.token_ids.tolist()
            return _Computed(block.outcome(token_ids, drawn.row_errors, pooled=pooled))
        asked = extras.before_draw(logits, len(block.samples))
        drawn = self._verification.draw(asked.sampled, block, self._last_tokens)
        asked.after_draw(drawn.token_ids)
        top = asked.most_likely
        most_likely = None if top is None else (top.values.numpy(), top.ids.numpy())
        token_ids = drawn.token_ids.tolist()
        return _Computed(block.outcome(token_ids, drawn.row_errors, most_likely, pooled))

    def close(self) -> None:
        """Do nothing: the memory is freed with the worker."""
