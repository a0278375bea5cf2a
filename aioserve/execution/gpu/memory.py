"""Measures the memory of a GPU that is left for KV pages beside weights and the largest step.

The memory of steps is found by running the largest one. So the pool can have the rest, and later
steps always find room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from aioserve.errors import ConfigError
from aioserve.execution.gpu.decoder_steps import DecoderSteps
from aioserve.execution.gpu.device import Device, Stream
from aioserve.execution.step_arrays import NO_COPIES, StepArrays, largest_counts
from aioserve.ops import HostBatch, SampleRows
from aioserve.paging.pages import pages_for
from aioserve.sampling.edits import RowEdits
from aioserve.sampling.extras import RowExtras
from aioserve.sampling.logprobs import LogprobRows
from aioserve.sampling_params import MAX_LOGPROBS, REHEARSED
from aioserve.steps.plan import MAX_SCORED_TOKENS

__all__ = [
    "MemoryCounts",
    "MemoryUse",
    "TorchMemory",
    "largest_step",
    "measure",
    "measure_step",
    "room_bytes",
]


class MemoryUse(NamedTuple):
    """Memory of one device, in bytes."""

    total: int
    free: int
    """Bytes that no process has."""
    held: int
    """Bytes that tensors of this process take."""
    peak: int
    """Most bytes held since `reset_peak`."""


class MemoryCounts(Protocol):
    """Reports the use of a device's memory. Neither call is for a hot path."""

    def reset_peak(self) -> None: ...

    def use(self) -> MemoryUse: ...


class TorchMemory:
    """Memory of a CUDA device, as torch counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def use(self) -> MemoryUse:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_allocated(self._device)
        return MemoryUse(total, free, held, torch.cuda.max_memory_allocated(self._device))


def measure_step(
    device: Device,
    model: DecoderSteps,
    memory: MemoryCounts,
    *,
    max_tokens: int,
    max_sequences: int,
) -> int:
    """Measure the bytes that the largest step takes beside weights, KV pages and its inputs.

    Runs the step, on a model whose first two pages are free, and so compiles kernels, too.
    """
    step = largest_step(
        max_tokens,
        max_sequences,
        model.max_model_len,
        model.page_size,
        num_slots=model.num_slots,
        num_groups=model.num_groups,
        vocab_size=model.decoder.config.vocab_size,
    )
    with device.within():
        host = device.host_memory(model.max_input_bytes)
        inputs = device.memory(model.max_input_bytes)
        results = device.memory(model.max_result_bytes)

        def compute(stream: Stream) -> None:
            packed = model.pack(step, host, None)
            stream.copy_to_device(inputs, host, packed.num_bytes)
            packed.enqueue(inputs, results)
            packed.finish(inputs, results)

        return measure(device, memory, compute)


def measure(device: Device, memory: MemoryCounts, compute: Callable[[Stream], None]) -> int:
    """Measure the most bytes that `compute` takes at once, with a new stream as the current one."""
    with device.within():
        stream = device.new_stream()
        device.synchronize()
        memory.reset_peak()
        before = memory.use().held
        with stream.current():
            compute(stream)
        device.synchronize()
        return memory.use().peak - before


def room_bytes(use: MemoryUse, step_bytes: int, utilization: float) -> int:
    """Return the bytes for KV pages. Raises `ConfigError` if nothing is left.

    The share `utilization` of the device is for this process and all others together.
    """
    taken = use.total - use.free
    room = int(use.total * utilization) - taken - step_bytes
    if room <= 0:
        raise ConfigError(
            f"memory_utilization={utilization} of the device's {use.total} bytes leaves nothing "
            f"for the KV cache: {taken} are taken, by weights and by other processes, and the "
            f"largest step takes {step_bytes}; lower max_num_batched_tokens or max_num_seqs, or "
            "raise memory_utilization",
            argument="memory_utilization",
            value=utilization,
        )
    return room


def largest_step(
    max_tokens: int,
    max_sequences: int,
    max_model_len: int,
    page_size: int,
    *,
    num_slots: int,
    num_groups: int,
    vocab_size: int,
) -> StepArrays:
    """Make the largest step: the most tokens of the most sequences, each with a row that is drawn.

    Decodes of the longest contexts come first, then prompts. All share one page. As many tokens as
    possible are scored, and all others are pooled. Every row asks for the most log-probabilities,
    and draws from edited logits.
    """
    counts = largest_counts(max_tokens, max_sequences, max_model_len)
    contexts = np.where(counts == 1, max_model_len, counts)
    ends = np.cumsum(counts)
    tokens, rows = int(ends[-1]), len(counts)
    scored = min(tokens, MAX_SCORED_TOKENS)
    table = np.zeros((num_groups, rows, pages_for(max_model_len, page_size)), np.int32)
    others = np.arange(tokens - scored)
    logit_rows = np.concatenate((ends - 1, np.arange(tokens - scored, tokens), others))
    of_sequences = np.bincount(np.searchsorted(ends, others, side="right"))
    pooled = tuple(of_sequences[of_sequences > 0].tolist())
    batch = HostBatch.laid_out(counts, contexts, table, page_size, logit_rows=logit_rows)
    slots = np.arange(rows) % num_slots  # a slot has a row for each verified draft token
    keys = np.zeros(rows, np.uint64)
    samples = SampleRows.alike(REHEARSED, slots, seeds=keys, positions=keys)
    logprobs = LogprobRows(
        range(rows),
        [min(MAX_LOGPROBS, vocab_size)] * (rows + scored),
        first_scored=rows,
        target_ids=np.zeros(scored, np.int64),
    )
    extras = RowExtras(RowEdits(()), logprobs)
    return StepArrays(0, NO_COPIES, batch, samples, extras, pooled)
