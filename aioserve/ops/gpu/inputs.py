# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false
"""All arrays of a step in one block of bytes, and the views of it that kernels read on the device.

    token ids | slots of pending tokens | ... | page tables | rows of logits
    └────────── at fixed offsets for given maxima ────────┘

One copy takes a step to the device, and a captured graph finds every step in the same place. The
page tables are by far the largest, so only the rows in use are copied. A sequence's rows in the
tables of all groups of layers therefore lie together. The rows of logits follow those in use. Most
steps have one per sequence, and some as many as tokens. Their place depends only on the number of
sequences, which a graph fixes.

Rows of logits are sampled from, except for the last ones of a step, which are only read.

A step of decodes can be padded to a captured size. Padding sequences have no context and attend to
nothing. They write their keys and values to a page of their own, and leave their token in a slot of
their own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from aioserve.ops.batch import BATCH_FIELDS, SAMPLE_FIELDS, HostBatch, SampleRows
from aioserve.ops.gpu.gpu_batch import QUERY_BLOCK, GpuBatch, HostPrompts
from aioserve.ops.gpu.sampling import DeviceSampleRows, Draws
from aioserve.paging.pages import pages_for
from aioserve.sampling_params import COLUMNS

__all__ = [
    "DeviceInputs",
    "InputLayout",
    "InputShape",
    "Padding",
    "fill_kernel",
    "fill_pending",
    "upload_samples",
]

_ALIGNMENT = 64
_TILE = 256
_TABLE_PAGES = 16
"""Unit of a page table's width, in pages, if a batch decides the width. Kernels are compiled anew
for a stride that 16 doesn't divide."""

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[np.generic]


class Padding(NamedTuple):
    """Number of sequences to which a step of decodes is padded, and targets of their writes."""

    num_sequences: int
    page: int
    slot: int


@dataclass(slots=True, frozen=True)
class InputShape:
    """Sizes of a packed step, as the host knows them, padding included."""

    num_tokens: int
    num_sequences: int
    num_rows: int
    """Rows of logits."""
    num_samples: int
    """Rows, from the first on, that are sampled; 0 if no samples were packed."""
    num_decodes: int
    num_query_blocks: int
    table_width: int
    """Pages of a row of the page table: as many as the batch's, or with padding the most."""
    max_context: int
    end_position: int
    pending: bool
    """True if tokens may have to be filled in on the device."""
    draws: Draws
    """Kinds of draws that its rows may ask for."""
    num_bytes: int
    """Bytes that the device needs, from the start of the block on."""
    prompts: HostPrompts
    """Prompts, which are not decodes: views of what was packed."""


class DeviceInputs(NamedTuple):
    """Views of one block on the device."""

    batch: GpuBatch
    samples: DeviceSampleRows
    token_slots: Tensor
    """int64 `[T]`: the slot that a pending token is in, -1 for a token that is known."""


class _Section(NamedTuple):
    offset: int
    dtype: np.dtype
    tensor_dtype: torch.dtype
    size: int


_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_TENSOR_DTYPES = {_INT64: torch.int64, _INT32: torch.int32, np.dtype(np.float64): torch.float64}
_SAME_BITS = {np.dtype(np.uint64): _INT64}
"""Dtypes that kernels take in place of ones that they lack."""

_BATCH = {field.name: field.dtype for field in BATCH_FIELDS}
_IDLE = {name: column.idle for name, column in COLUMNS.items()}
_SAMPLES = {
    field.name: (_SAME_BITS.get(field.dtype, field.dtype), _IDLE.get(field.name, 0))
    for field in SAMPLE_FIELDS
}
"""Dtype that holds the same bits, and the value of a padded row, for each array of `SampleRows`."""


def _aligned(count: int, unit: int = _ALIGNMENT) -> int:
    return -(-count // unit) * unit


def _of_sample(name: str) -> str:
    """Name of the section of an array of `SampleRows`."""
    return f"sample_{name}"


class InputLayout:
    """Places of all arrays, for steps up to the given sizes.

    These are tokens, sequences, sampled rows, rows of logits that are not sampled, and pages of a
    sequence in each of `num_groups` groups.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        max_rows: int,
        max_unsampled: int = 0,
        max_pages: int,
        page_size: int,
        num_groups: int = 1,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.max_rows = max_rows
        self.max_unsampled = max_unsampled
        self.max_pages = max_pages
        self.page_size = page_size
        self.num_groups = num_groups
        max_blocks = max_tokens // QUERY_BLOCK + max_sequences
        self._sections: dict[str, _Section] = {}
        offset = 0
        for name, dtype, size in (
            ("token_ids", _BATCH["token_ids"], max_tokens),
            ("token_slots", _BATCH["pending_slots"], max_tokens),
            ("token_locations", _BATCH["token_locations"], num_groups * max_tokens),
            ("positions", _BATCH["positions"], max_tokens),
            ("query_start", _BATCH["query_start"], max_sequences + 1),
            ("context_lens", _BATCH["context_lens"], max_sequences),
            ("query_blocks", _INT32, 2 * max_blocks),
            *((_of_sample(name), dtype, max_rows) for name, (dtype, _) in _SAMPLES.items()),
            ("page_table", _BATCH["page_table"], max_sequences * num_groups * max_pages),
        ):
            self._sections[name] = _Section(offset, dtype, _TENSOR_DTYPES[dtype], size)
            offset += _aligned(size * dtype.itemsize)
        self.num_bytes: int = offset + 8 * (max_rows + max_unsampled)

    @classmethod
    def of(cls, host: HostBatch, page_size: int) -> InputLayout:
        """Layout just large enough for this batch."""
        return cls(
            max_tokens=len(host.token_ids),
            max_sequences=len(host.context_lens),
            max_rows=len(host.logit_rows),
            max_pages=_aligned(pages_for(host.max_context, page_size), _TABLE_PAGES),
            page_size=page_size,
            num_groups=len(host.page_table),
        )

    def pack(
        self,
        host: HostBatch,
        samples: SampleRows | None,
        target: Bytes,
        *,
        num_unsampled: int = 0,
        padding: Padding | None = None,
    ) -> InputShape:
        """Write a step to `target`, `num_bytes` long. Other bytes stay unchanged.

        `samples` are of all rows of logits but the last `num_unsampled`. With `padding` each
        sequence must have one token and one row that is sampled; there may be no sequence. Raises
        ValueError for a step that is larger than the layout, naming what doesn't fit.
        """
        tokens, sequences, rows = len(host.token_ids), len(host.context_lens), len(host.logit_rows)
        if samples is not None and len(samples) != rows - num_unsampled:
            raise ValueError(
                f"a step with {rows} rows of logits, {num_unsampled} of them not sampled, must "
                f"have {rows - num_unsampled} rows of samples, got {len(samples)}"
            )
        size = sequences
        if padding is not None:
            size = padding.num_sequences
            if not tokens == sequences == rows or num_unsampled or sequences > size:
                raise ValueError(
                    f"a step of {tokens} tokens of {sequences} sequences with {rows} rows of "
                    f"logits, {num_unsampled} of them not sampled, can't be padded to {size} "
                    "decodes"
                )
        added = size - sequences
        needed_pages = pages_for(host.max_context, self.page_size)
        sampled = 0 if samples is None else rows - num_unsampled + added
        groups = len(host.page_table)
        self._check_sizes(tokens + added, size, sampled, rows + added, needed_pages, groups)

        def put(name: str, array: Array, fill: float = 0, *, pad: bool = True) -> None:
            section = self._view(name, target)
            section[: len(array)] = array
            if pad and added:
                section[len(array) : len(array) + added] = fill

        counts = np.diff(host.query_start)
        put("token_ids", host.token_ids)
        slots = np.full(tokens, -1, np.int64)
        slots[host.pending_rows] = host.pending_slots
        put("token_slots", slots, -1)
        put("positions", host.positions)
        put("query_start", host.query_start, pad=False)
        put("context_lens", host.context_lens)
        logit_rows = target[self._logit_rows(size, rows + added)].view(np.int64)
        logit_rows[:rows] = host.logit_rows
        locations = self._view("token_locations", target).reshape(self.num_groups, self.max_tokens)
        locations[:, :tokens] = host.token_locations
        if padding is not None:
            locations[:, tokens : tokens + added] = padding.page * self.page_size
            ends = np.arange(sequences, size)
            self._view("query_start", target)[sequences + 1 : size + 1] = ends + 1
            logit_rows[sequences:size] = ends
        if samples is not None:
            for name, array in samples.arrays().items():
                dtype, neutral = _SAMPLES[name]
                fill = padding.slot if padding is not None and name == "slots" else neutral
                put(_of_sample(name), array.view(dtype), fill)
        decodes = _leading_ones(counts)
        blocks = _query_blocks(counts, decodes)
        put("query_blocks", blocks.ravel(), pad=False)
        width = min(host.page_table.shape[2], self.max_pages)
        tables = self._tables(target)
        tables[:sequences, :, :width] = host.page_table[:, :, :width].swapaxes(0, 1)
        if padding is not None:
            tables[sequences:size] = padding.page
            # The same shape for all contexts: graphs are captured with it.
            width = self.max_pages
        return InputShape(
            num_tokens=tokens + added,
            num_sequences=size,
            num_rows=rows + added,
            num_samples=sampled,
            num_decodes=decodes + added,
            num_query_blocks=len(blocks),
            table_width=width,
            max_context=host.max_context,
            end_position=host.end_position,
            pending=padding is not None or len(host.pending_rows) > 0,
            draws=Draws.GREEDY if samples is None else Draws.of(samples),
            num_bytes=self._logit_rows(size, rows + added).stop,
            prompts=HostPrompts(
                counts[decodes:], host.context_lens[decodes:], host.page_table[:, decodes:]
            ),
        )

    def views(self, block: Tensor, shape: InputShape, num_splits: int) -> DeviceInputs:
        """Views of the packed step on the device: `block`, uint8, holds its first
        `shape.num_bytes`.

        Always the same addresses for the same block.
        """

        get = functools.partial(self._on_device, block)
        tokens, sequences = shape.num_tokens, shape.num_sequences
        groups, pages = self.num_groups, self.max_pages
        tables = get("page_table", sequences * groups * pages).view(sequences, groups, pages)
        locations = get("token_locations", groups * self.max_tokens).view(groups, self.max_tokens)
        batch = GpuBatch(
            token_ids=get("token_ids", tokens),
            positions=get("positions", tokens),
            logit_rows=block[self._logit_rows(sequences, shape.num_rows)].view(torch.int64),
            end_position=shape.end_position,
            query_start=get("query_start", sequences + 1),
            context_lens=get("context_lens", sequences),
            page_tables=tables[:, :, : shape.table_width].unbind(1),
            token_locations=locations[:, :tokens].unbind(),
            num_sequences=sequences,
            num_decodes=shape.num_decodes,
            query_blocks=get("query_blocks", 2 * shape.num_query_blocks).view(-1, 2),
            num_splits=num_splits,
            prompts=shape.prompts,
        )
        return DeviceInputs(batch, self.samples(block, shape), get("token_slots", tokens))

    def samples(self, block: Tensor, shape: InputShape) -> DeviceSampleRows:
        """The views of `views` that say how rows are sampled."""
        get, rows = functools.partial(self._on_device, block), shape.num_samples
        tensors = {name: get(_of_sample(name), rows) for name in _SAMPLES}
        return DeviceSampleRows.of(tensors, shape.draws)

    def _on_device(self, block: Tensor, name: str, size: int) -> Tensor:
        section = self._sections[name]
        end = section.offset + size * section.dtype.itemsize
        return block[section.offset : end].view(section.tensor_dtype)

    def _logit_rows(self, num_sequences: int, num_rows: int) -> slice:
        """Bytes of the rows of logits, after the page tables of `num_sequences` sequences."""
        tables = 4 * num_sequences * self.num_groups * self.max_pages
        start = self._sections["page_table"].offset + _aligned(tables)
        return slice(start, start + 8 * num_rows)

    def _view(self, name: str, target: Bytes) -> npt.NDArray[np.generic]:
        section = self._sections[name]
        end = section.offset + section.size * section.dtype.itemsize
        return target[section.offset : end].view(section.dtype)

    def _tables(self, target: Bytes) -> npt.NDArray[np.generic]:
        shape = self.max_sequences, self.num_groups, self.max_pages
        return self._view("page_table", target).reshape(shape)

    def _check_sizes(
        self, tokens: int, sequences: int, sampled: int, rows: int, pages: int, groups: int
    ) -> None:
        if groups != self.num_groups:
            raise ValueError(
                f"a step must have page tables of {self.num_groups} groups, got {groups}"
            )
        for name, given, limit in (
            ("tokens", tokens, self.max_tokens),
            ("sequences", sequences, self.max_sequences),
            ("sampled rows", sampled, self.max_rows),
            ("rows of logits", rows, self.max_rows + self.max_unsampled),
            ("pages of a sequence", pages, self.max_pages),
        ):
            if given > limit:
                raise ValueError(f"a step may have at most {limit} {name}, got {given}")


def _leading_ones(counts: npt.NDArray[np.int32]) -> int:
    others = np.flatnonzero(counts != 1)
    return int(others[0]) if len(others) else len(counts)


def _query_blocks(counts: npt.NDArray[np.int32], decodes: int) -> npt.NDArray[np.int32]:
    """int32 `[N, 2]`: see `GpuBatch.query_blocks`."""
    rows = [
        (sequence, first)
        for sequence, count in enumerate(counts[decodes:].tolist(), decodes)
        for first in range(0, count, QUERY_BLOCK)
    ]
    return np.array(rows, np.int32).reshape(-1, 2)


def upload_samples(rows: SampleRows, device: torch.device) -> DeviceSampleRows:
    """Copy rows to memory of their own on the device."""
    arrays = {name: array.view(_SAMPLES[name][0]) for name, array in rows.arrays().items()}
    copies = {name: torch.from_numpy(array.copy()).to(device) for name, array in arrays.items()}
    return DeviceSampleRows.of(copies, Draws.of(rows))


@triton.jit
def fill_kernel(token_ids, token_slots, last_tokens, count, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(token_slots + at, mask=at < count, other=-1)
    pending = slot >= 0
    tl.store(token_ids + at, tl.load(last_tokens + slot, mask=pending, other=0), mask=pending)


def fill_pending(inputs: DeviceInputs, last_tokens: Tensor) -> None:
    """Fill in the tokens that an earlier step has left in their slots."""
    count = inputs.token_slots.shape[0]
    if count:
        fill_kernel[(triton.cdiv(count, _TILE),)](
            inputs.batch.token_ids,
            inputs.token_slots,
            last_tokens,
            count,
            TILE=_TILE,
            num_warps=4,
        )
