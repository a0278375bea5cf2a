"""A decoder's steps on a GPU, as the runner drives them: from packed inputs to tokens.

Padding has its own page and slot after all others, which no plan names.

Rows that ask for more than a draw need further launches and memory, and masks may come late. A
graph of decodes with such rows therefore ends with their logits, and sampling follows it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import InvariantError
from aioserve.execution.gpu.device import HostMemory
from aioserve.execution.gpu.step_model import ResultShape
from aioserve.execution.speculation.drafts.state_pages import StatePages
from aioserve.execution.step_arrays import StepArrays
from aioserve.models.decoder import Decoder
from aioserve.ops import HostBatch, KVCache, SampleRows
from aioserve.ops.gpu import sampling
from aioserve.ops.gpu.attention_tiles import decode_splits
from aioserve.ops.gpu.gpu_batch import GpuBatch
from aioserve.ops.gpu.inputs import InputLayout, InputShape, Padding, fill_pending
from aioserve.ops.gpu.page_copies import PageCopies
from aioserve.paging.pages import pages_for
from aioserve.sampling.extras import RowExtras
from aioserve.steps.plan import MAX_SCORED_TOKENS

__all__ = ["DecoderSteps"]

FORWARD = "forward"
"""Variant of steps that leave logits, and are sampled by `finish`."""


class DecoderSteps:
    """The `StepModel` of a decoder whose backend is `CudaBackend`.

    - `cache`: has one page more than plans may name.
    - `num_slots`: slots that plans may name.
    - `max_tokens`, `max_sequences`: limits of a step. Each verified draft token counts as a
      sequence.
    - `max_model_len`: longest context in tokens.

    A step samples at most as many rows as there are slots, or sequences.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        host_cache: KVCache | None = None,
        num_slots: int,
        max_model_len: int,
        max_tokens: int,
        max_sequences: int,
        states: StatePages | None = None,
    ) -> None:
        """`states` takes what the decoder keeps of a step's tokens. It has as many pages as
        `cache`."""
        self.decoder = decoder
        self._states = states
        self.max_model_len = max_model_len
        self.cache = cache
        self.page_size: int = cache.page_size
        self.num_groups: int = cache.layout.num_groups
        self.hidden_size: int = decoder.config.hidden_size
        max_rows = max(num_slots, max_sequences)
        largest = ResultShape.largest(max_rows, max_sequences, self.hidden_size)
        self.max_result_bytes: int = largest.num_bytes
        self.variants: Sequence[Hashable] = (sampling.Draws.GREEDY, sampling.Draws.OPEN)
        """Variants captured at the start. Rows that are filtered, or ask for more than a draw,
        are rare: their graphs wait until they are needed."""
        self._logits: Tensor | None = None
        """Logits that `FORWARD` leaves, float32 `[max_rows, V]`, from the first such step on.
        Graphs have its address."""
        max_tokens = max(max_tokens, max_sequences)
        self._layout = InputLayout(
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_rows=max_rows,
            # Tokens of scored prompts, and of prompts whose hidden states are summed.
            max_unsampled=MAX_SCORED_TOKENS + max_tokens,
            max_pages=pages_for(max_model_len, cache.page_size),
            page_size=cache.page_size,
            num_groups=self.num_groups,
        )
        self.max_input_bytes: int = self._layout.num_bytes
        self._padding_page = cache.num_pages - 1
        self.num_slots: int = num_slots
        self._padding_slot = num_slots
        self._max_rows = max_rows
        self._last_tokens = decoder.backend.allocate_slots(num_slots + 1)
        caches = (cache,) if host_cache is None else (cache, host_cache)
        self._page_copies = PageCopies(caches)
        # Graphs keep the addresses of these tables, so the tables must not grow any more.
        decoder.cover(max_model_len)

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits that graphs leave for sampling after them, allocated by the first
        such step."""
        return 4 * self._max_rows * self.decoder.config.vocab_size

    def pack(self, step: StepArrays, target: HostMemory, padded_to: int | None) -> _PackedStep:
        if step.batch is None:
            raise InvariantError(f"step {step.step} has nothing to compute")
        return self._pack(step.batch, step.samples, step.extras, step.pooled, target, padded_to)

    def pack_padding(self, target: HostMemory, padded_to: int, variant: Hashable) -> _PackedStep:
        nothing, empty = np.empty(0, np.int32), np.empty((self.num_groups, 0, 1), np.int32)
        batch = HostBatch.laid_out(nothing, nothing, empty, self.page_size)
        packed = self._pack(batch, SampleRows.none(), None, (), target, padded_to)
        return replace(packed, shape=replace(packed.shape, draws=_draws(variant)))

    def _pack(
        self,
        batch: HostBatch,
        samples: SampleRows,
        extras: RowExtras | None,
        pooled: tuple[int, ...],
        target: HostMemory,
        padded_to: int | None,
    ) -> _PackedStep:
        padding, max_context = None, batch.max_context
        if padded_to is not None:
            padding = Padding(padded_to, self._padding_page, self._padding_slot)
            # Nothing in a graph may depend on the step.
            max_context = self.max_model_len
        logprobs = None if extras is None else extras.logprobs
        num_scored = 0 if logprobs is None else len(logprobs.target_ids)
        shape = self._layout.pack(
            batch, samples, target.array, num_unsampled=num_scored + sum(pooled), padding=padding
        )
        splits = decode_splits(shape.num_decodes, self.cache.num_kv_heads, max_context)
        told = (0, 0) if logprobs is None else (len(logprobs), logprobs.width)
        results = ResultShape(shape.num_samples, *told, len(pooled), self.hidden_size)
        apart = extras is not None and padded_to is not None
        return _PackedStep(self, shape, splits, results, extras, pooled, is_sampled_apart=apart)

    def copy_pages(self, table: HostMemory, num_copies: int) -> None:
        copies = torch.from_numpy(table.array[: 20 * num_copies]).view(torch.int32)
        self._page_copies.launch(copies.view(num_copies, 5), num_copies)

    def enqueue(self, packed: _PackedStep, inputs: Tensor, results: Tensor) -> None:
        """Compute a packed step on torch's current stream, except for what `finish` does."""
        views = self._layout.views(inputs, packed.shape, packed.num_splits)
        fill_pending(views, self._last_tokens)
        try:
            logits = self._forward(packed, views.batch, results)
        finally:
            # A graph would go on writing to it, and draft tokens may have its memory.
            self.decoder.leave_room()
        if packed.is_sampled_apart:
            if self._logits is None:
                self._logits = logits.new_empty((self._max_rows, logits.shape[1]))
            self._logits[: len(logits)] = logits
        else:
            self._sample(packed, views.samples, logits, results)

    def _forward(self, packed: _PackedStep, batch: GpuBatch, results: Tensor) -> Tensor:
        if packed.pooled:
            logits, sums = self.decoder.forward_pooled(batch, self.cache, packed.pooled)
            results[packed.result_shape.pooled].view(torch.float32).view(sums.shape).copy_(sums)
        else:
            logits = self.decoder.forward(batch, self.cache)
        if self._states is not None:
            self._states.put_at(batch.token_locations[0], self.decoder.kept_states)
        return logits

    def finish(self, packed: _PackedStep, inputs: Tensor, results: Tensor) -> None:
        if not packed.is_sampled_apart:
            return
        if self._logits is None:
            raise InvariantError("a step is sampled from logits that no step has left")
        samples = self._layout.samples(inputs, packed.shape)
        self._sample(packed, samples, self._logits[: packed.result_shape.num_rows], results)

    def _sample(
        self,
        packed: _PackedStep,
        samples: sampling.DeviceSampleRows,
        logits: Tensor,
        results: Tensor,
    ) -> None:
        shape, extras = packed.result_shape, packed.extras
        token_ids = results[shape.token_ids].view(torch.int64)
        statuses = results[shape.statuses].view(torch.int32)
        if extras is None:
            sampling.draw(logits, samples, self._last_tokens, token_ids, statuses)
            return
        asked = extras.before_draw(logits, shape.num_rows)
        sampling.draw(asked.sampled, samples, self._last_tokens, token_ids, statuses)
        asked.after_draw(token_ids)
        if (most_likely := asked.most_likely) is not None:
            values, top_ids = most_likely.values, most_likely.ids
            results[shape.logprobs].view(torch.float32).view(values.shape).copy_(values)
            results[shape.top_ids].view(torch.int32).view(top_ids.shape).copy_(top_ids)


@dataclass(slots=True, frozen=True)
class _PackedStep:
    model: DecoderSteps
    shape: InputShape
    num_splits: int
    result_shape: ResultShape
    extras: RowExtras | None
    pooled: tuple[int, ...]
    """Counts as in `StepArrays`. Steps that pool are never padded."""
    is_sampled_apart: bool = False
    """True if `finish` samples it."""

    @property
    def num_bytes(self) -> int:
        return self.shape.num_bytes

    @property
    def variant(self) -> Hashable:
        return FORWARD if self.is_sampled_apart else self.shape.draws

    def enqueue(self, inputs: Tensor, results: Tensor) -> None:
        self.model.enqueue(self, inputs, results)

    def finish(self, inputs: Tensor, results: Tensor) -> None:
        self.model.finish(self, inputs, results)


def _draws(variant: Hashable) -> sampling.Draws:
    if not isinstance(variant, sampling.Draws):
        raise InvariantError(f"steps of a decoder have no variant {variant!r}")
    return variant
