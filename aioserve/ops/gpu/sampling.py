# Triton's own types don't know what its compiler does with arguments and constants.
# pyright: reportCallIssue=false
"""Draw a token for each row of logits, on the device: nothing is read back.

`aioserve.sampling.sampler` defines the draw. Given the weights, which are whole numbers
(`selection`), the choice of kept tokens is exact. Weights come from float32 powers. If `top_p`
falls within their rounding of a border between two tokens, another device may keep the other one.
Scores of the race among kept tokens are in float64 (`race`).

Each row is computed separately. A greedy row costs two launches: the largest of each block of
columns, and of these. If `top_p` leaves some out, blocks are weighed. Tokens that `top_k` or
`top_p` may keep are gathered in a list of seldom more than some hundreds, and its end is searched
there. If more than LISTED are left, the whole row is searched: right as well, but slow. Then blocks
of neighbouring ids race, and their winners.

Steps with rows that ask for `min_p` or `typical_p` are filtered first (`filters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from aioserve.ops.batch import SampleRows
from aioserve.ops.gpu.filters import filtered
from aioserve.ops.gpu.race import race_kernel, win_kernel
from aioserve.ops.gpu.sampling_kernels import (
    border_kernel,
    first_kernel,
    gather_kernel,
    reduce_kernel,
    weigh_kernel,
)
from aioserve.ops.gpu.selection import MAX_VOCAB
from aioserve.sampling_params import COLUMNS as PARAMETER_COLUMNS

__all__ = ["DeviceSampleRows", "Draws", "draw"]

LINES = 32
"""Lines of the matrix that a row is taken as, to be cut into blocks."""
COLUMNS = 128
"""Columns of a block, of LINES entries each."""
GROUPS = 32
"""Parts of a block of which the largest is known."""
LEVELS = 8
"""Levels from which weights are summed: the smallest, and 2**-2, 2**-4 ... of the largest."""
LISTED = 8192
SEARCHED = 512
"""Entries that a search looks at together."""
CALLS = 1024
"""Calls of Philox for a block of a race, each for four ids; a multiple of 16."""


class Draws(IntEnum):
    """Demands of the rows of a step: none, a temperature, or `min_p` or `typical_p` as well."""

    GREEDY = 0
    OPEN = 1
    FILTERED = 2

    @classmethod
    def of(cls, rows: SampleRows) -> Draws:
        if not rows["temperature"].any():
            return cls.GREEDY
        return (
            cls.FILTERED if (rows["min_p"] > 0).any() or (rows["typical_p"] < 1).any() else cls.OPEN
        )


@dataclass(slots=True, frozen=True)
class DeviceSampleRows:
    """`SampleRows` on the device. `seeds` and `positions` are int64 with the same bits.

    A launch must know beforehand what rows may ask for: `draws` covers all of them.
    """

    slots: Tensor
    columns: Mapping[str, Tensor]
    seeds: Tensor
    positions: Tensor
    draws: Draws

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], draws: Draws) -> DeviceSampleRows:
        """Make rows from tensors by the names of `SampleRows.arrays`."""
        columns = {name: tensors[name] for name in PARAMETER_COLUMNS}
        return cls(tensors["slots"], columns, tensors["seeds"], tensors["positions"], draws)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]


class _Drawn(NamedTuple):
    """Memory for rows with a temperature."""

    masses: Tensor
    totals: Tensor
    listed: Tensor
    listed_ids: Tensor
    orders: Tensor
    last_ids: Tensor
    scores: Tensor
    winners: Tensor

    @classmethod
    def of(cls, count: int, blocks: int, raced: int, device: torch.device) -> _Drawn:
        return cls(
            torch.empty((count, blocks, LEVELS), dtype=torch.int64, device=device),
            torch.empty(count, dtype=torch.int64, device=device),
            torch.empty((count, LISTED), dtype=torch.float32, device=device),
            torch.empty((count, LISTED), dtype=torch.int32, device=device),
            torch.empty(count, dtype=torch.int64, device=device),
            torch.empty(count, dtype=torch.int32, device=device),
            torch.empty((count, raced), dtype=torch.float64, device=device),
            torch.empty((count, raced), dtype=torch.int32, device=device),
        )


def draw(
    logits: Tensor,
    rows: DeviceSampleRows,
    last_tokens: Tensor,
    token_ids_out: Tensor,
    statuses_out: Tensor,
) -> None:
    """Draw a token from each row of `logits`, float32 `[S, V]`, and leave it in its slot as well.

    `token_ids_out` int64 `[S]` gets 0 in rows that failed. `statuses_out` int32 `[S]` gets the
    reason, an index of `STATUS_ERRORS`, and 0 in all others. All memory is taken before anything is
    written to these, or to a slot. A draw that runs out of memory may be repeated.
    """
    count, vocab = logits.shape
    if not count:
        return
    if vocab > MAX_VOCAB:
        raise ValueError(f"logits must have at most {MAX_VOCAB} columns, got {vocab}")
    if logits.stride(1) != 1 and vocab > 1:
        logits = logits.contiguous()
    top_ks, top_ps = rows["top_k"], rows["top_p"]
    if rows.draws is Draws.FILTERED:
        logits, top_ks, top_ps = filtered(
            logits, rows["temperature"], top_ks, top_ps, rows["min_p"], rows["typical_p"]
        )
    width = -(-vocab // LINES)
    blocks = -(-width // COLUMNS)
    device = logits.device
    block_largest = torch.empty((count, blocks), dtype=torch.float32, device=device)
    block_ids = torch.empty((count, blocks), dtype=torch.int32, device=device)
    group_largest = torch.empty((count, blocks * GROUPS), dtype=torch.float32, device=device)
    # Each begins at an aligned address: kernels are compiled anew for one that doesn't.
    largests = torch.empty(count, dtype=torch.float32, device=device)
    floors = torch.empty(count, dtype=torch.float32, device=device)
    kinds = torch.empty(count, dtype=torch.int32, device=device)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    raced = -(-vocab // (4 * CALLS))
    drawn = None if rows.draws is Draws.GREEDY else _Drawn.of(count, blocks, raced, device)
    tile = {"VOCAB": vocab, "LINES": LINES, "COLS": COLUMNS}
    parts = {"BLOCKS": blocks, "BLOCKS_TILE": triton.next_power_of_2(blocks)}
    stride = logits.stride(0)

    reduce_kernel[(count, blocks)](
        logits,
        block_largest,
        block_ids,
        group_largest,
        stride,
        **tile,
        GROUPS=GROUPS,
        num_warps=4,
    )
    first_kernel[(count,)](
        block_largest,
        block_ids,
        group_largest,
        rows["temperature"],
        top_ks,
        top_ps,
        rows.slots,
        last_tokens,
        token_ids_out,
        statuses_out,
        largests,
        floors,
        kinds,
        counts,
        VOCAB=vocab,
        **parts,
        GROUPS=GROUPS,
        SEARCHED=SEARCHED,
        num_warps=4,
    )
    if drawn is None:
        return
    masses, totals, listed, listed_ids, orders, last_ids, scores, winners = drawn
    weigh_kernel[(count, blocks)](
        logits,
        rows["temperature"],
        top_ks,
        largests,
        kinds,
        masses,
        stride,
        **tile,
        LEVELS=LEVELS,
        num_warps=4,
    )
    gather_kernel[(count, blocks)](
        logits,
        rows["temperature"],
        top_ks,
        top_ps,
        largests,
        floors,
        kinds,
        masses,
        totals,
        counts,
        listed,
        listed_ids,
        stride,
        **tile,
        LEVELS=LEVELS,
        **parts,
        LISTED=LISTED,
        num_warps=4,
    )
    border_kernel[(count,)](
        logits,
        rows["temperature"],
        top_ks,
        top_ps,
        largests,
        floors,
        kinds,
        totals,
        counts,
        listed,
        listed_ids,
        orders,
        last_ids,
        stride,
        VOCAB=vocab,
        LISTED=LISTED,
        SEARCHED=SEARCHED,
        num_warps=8,
    )
    race_kernel[(count, raced)](
        logits,
        rows["temperature"],
        rows.seeds,
        rows.positions,
        largests,
        kinds,
        orders,
        last_ids,
        scores,
        winners,
        stride,
        VOCAB=vocab,
        CALLS=CALLS,
        num_warps=4,
    )
    win_kernel[(count,)](
        scores,
        winners,
        kinds,
        rows.slots,
        last_tokens,
        token_ids_out,
        statuses_out,
        BLOCKS=raced,
        BLOCKS_TILE=triton.next_power_of_2(raced),
        num_warps=4,
    )
