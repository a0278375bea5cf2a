"""One step as arrays: on the host, where a plan is read, and on the device, where it is computed.

Knows shapes and dtypes; must not know requests, page ownership or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aioserve.paging.pages import token_locations, tokens_in_part
from aioserve.sampling_params import COLUMNS, DRAWN_FREELY

__all__ = [
    "BATCH_FIELDS",
    "NOTHING_LEFT",
    "SAMPLE_FIELDS",
    "STATUS_ERRORS",
    "ArrayField",
    "Batch",
    "Drawn",
    "HostBatch",
    "SampleRows",
    "row_error",
]

NOTHING_LEFT = "all logits are -inf"


class ArrayField(NamedTuple):
    """One array of a step. Checks, the bytes of a step and the inputs of a GPU are made from
    these."""

    name: str
    dtype: np.dtype[Any]
    sizes: tuple[str, ...]
    """Name of each dimension's length. A name stands for one length in all arrays of a step."""
    more: int = 0
    """Entries beyond the length of the last dimension."""


_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)

BATCH_FIELDS: tuple[ArrayField, ...] = (
    ArrayField("token_ids", _INT64, ("T",)),
    ArrayField("query_start", _INT32, ("B",), more=1),
    ArrayField("context_lens", _INT32, ("B",)),
    ArrayField("page_table", _INT32, ("G", "B", "P")),
    ArrayField("token_locations", _INT64, ("G", "T")),
    ArrayField("positions", _INT32, ("T",)),
    ArrayField("logit_rows", _INT64, ("S",)),
    ArrayField("pending_rows", _INT64, ("N",)),
    ArrayField("pending_slots", _INT64, ("N",)),
)
"""Fields of `HostBatch`."""

_SAMPLED_POSITIONS = ArrayField("positions", np.dtype(np.uint64), ("R",))

SAMPLE_FIELDS: tuple[ArrayField, ...] = (
    ArrayField("slots", _INT64, ("R",)),
    *[ArrayField(name, np.dtype(one.dtype), ("R",)) for name, one in COLUMNS.items()],
    ArrayField("seeds", np.dtype(np.uint64), ("R",)),
    _SAMPLED_POSITIONS,
)
"""Arrays of `SampleRows`."""


@dataclass(slots=True, frozen=True)
class HostBatch:
    """Input of a step, in numpy: T tokens of B sequences, one sequence after the other.

    Row `i` of sequence `b` writes its entry, a token's keys and values, into the pages at index
    `context_lens[b] - (query_start[b + 1] - query_start[b]) + i`. Order and window, which decide
    the entries that it sees, go by indices. Rotations, learned embeddings and factors on queries go
    by `positions`. The two are equal until entries are dropped. All arrays are contiguous:

        token_ids      int64 [T]      any value where a token is pending
        query_start    int32 [B + 1]  prefix sums of the query tokens per sequence
        context_lens   int32 [B]      entries in the KV pages after this step's writes
        page_table     int32 [G, B, P] pages of each group of layers in order of index; those past
                                      the context, or before a group's window, are never read
        token_locations int64 [G, T]  page * page_size + offset, where a token's entry is written
        positions      int32 [T]      places of the tokens in their texts
        logit_rows     int64 [S]      rows of T whose logits are wanted; S may be 0
        pending_rows   int64 [N]      rows of T whose token the step before samples, and ...
        pending_slots  int64 [N]      ... the slot that it leaves it in

    Raises TypeError or ValueError naming the array that doesn't fit.
    """

    token_ids: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]
    token_locations: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int64]
    pending_rows: npt.NDArray[np.int64]
    pending_slots: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        groups, _, width = self.page_table.shape if self.page_table.ndim == 3 else (-1, -1, -1)
        sizes = {
            "T": len(self.token_ids),
            "B": len(self.context_lens),
            "G": groups,
            "P": width,
            "S": len(self.logit_rows),
            "N": len(self.pending_rows),
        }
        _check_fields(partial(getattr, self), BATCH_FIELDS, sizes)

    @classmethod
    def laid_out(
        cls,
        counts: npt.NDArray[np.integer[Any]],
        contexts: npt.NDArray[np.integer[Any]],
        page_table: npt.NDArray[np.int32],
        page_size: int,
        *,
        logit_rows: Sequence[int] | npt.NDArray[np.int64] = (),
    ) -> HostBatch:
        """Lay out sequences of `counts` query tokens, all of id 0, at the ends of `contexts`. Their
        pages come from a table, int32 [G, B, P]. No entry was dropped: positions are indices."""
        ends = np.cumsum(counts, dtype=np.int64)
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(rows)) - np.repeat(ends - contexts, counts)
        nothing = np.empty(0, np.int64)
        return cls(
            token_ids=np.zeros(len(rows), np.int64),
            query_start=np.concatenate(([0], ends)).astype(np.int32),
            context_lens=contexts.astype(np.int32),
            page_table=page_table,
            token_locations=token_locations(page_table, rows, positions, page_size),
            positions=positions.astype(np.int32),
            logit_rows=np.array(logit_rows, np.int64),
            pending_rows=nothing,
            pending_slots=nothing,
        )

    def advance(self, page_size: int) -> None:
        """Turn it, in place, into the batch of each sequence's next token, whose id is to be set.
        Each sequence must have one token, and pages for one more. Raises ValueError for other
        numbers of tokens."""
        if len(self.positions) != len(self.context_lens) or len(self.pending_rows):
            raise ValueError(
                f"a batch goes on in place with one known token of each of its "
                f"{len(self.context_lens)} sequences, got {len(self.positions)} tokens, "
                f"{len(self.pending_rows)} of them pending"
            )
        for array in (self.context_lens, self.positions, self.token_locations):
            array += 1
        indices = self.context_lens - 1
        if not tokens_in_part(indices, page_size).all():
            rows = np.arange(len(indices))
            places = token_locations(self.page_table, rows, indices, page_size)
            self.token_locations[:] = places

    @property
    def max_context(self) -> int:
        """Entries of the longest context."""
        return int(self.context_lens.max(initial=0))

    @property
    def end_position(self) -> int:
        """Upper bound of the positions: the largest one, plus 1."""
        return int(self.positions.max(initial=-1)) + 1


@dataclass(slots=True, frozen=True)
class SampleRows:
    """Parameters by which S rows of logits are sampled, in numpy, and slots of the tokens.

        slots      int64 [S]   where the next step finds the token
        columns    [S] each    parameters, by their names and of their dtypes in `COLUMNS`
        seeds      uint64 [S]
        positions  uint64 [S]  of the token that is sampled

    `rows["temperature"]` is that column. Raises TypeError or ValueError naming the array that
    doesn't fit.
    """

    slots: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        if self.columns.keys() != COLUMNS.keys():
            raise ValueError(f"columns must be {', '.join(COLUMNS)}, got {', '.join(self.columns)}")
        _check_fields(self.arrays().__getitem__, SAMPLE_FIELDS, {"R": len(self.slots)})

    @classmethod
    def none(cls) -> SampleRows:
        """No rows."""
        keys = np.empty(0, np.uint64)
        return cls.alike(DRAWN_FREELY, np.empty(0, np.int64), seeds=keys, positions=keys)

    @classmethod
    def alike(
        cls,
        values: Mapping[str, float],
        slots: npt.NDArray[np.int64],
        *,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint64],
    ) -> SampleRows:
        """Rows for these slots, all with the same `values` of parameters, by the names in
        `COLUMNS`. Raises as the class does."""
        columns = {
            name: np.full(len(slots), values[name], column.dtype)
            for name, column in COLUMNS.items()
        }
        return cls(slots, columns, seeds, positions)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.slots)

    def at(self, positions: npt.NDArray[np.uint64]) -> SampleRows:
        """Rows with the same parameters for the tokens at other positions, uint64 `[S]`. Raises as
        the class does."""
        rows = object.__new__(SampleRows)
        object.__setattr__(rows, "slots", self.slots)
        object.__setattr__(rows, "columns", self.columns)
        object.__setattr__(rows, "seeds", self.seeds)
        object.__setattr__(rows, "positions", positions)
        # This is done in each step, so the rest isn't checked again.
        _check_fields(partial(getattr, rows), (_SAMPLED_POSITIONS,), {"R": len(self.slots)})
        return rows

    def repeated(self, counts: Sequence[int], positions: npt.NDArray[np.uint64]) -> SampleRows:
        """Repeat each row `counts` times, for the tokens at these positions, uint64, one each.
        Raises as the class does."""
        return self.picked(np.repeat(np.arange(len(self)), counts), positions)

    def picked(
        self, at: npt.NDArray[np.integer[Any]], positions: npt.NDArray[np.uint64]
    ) -> SampleRows:
        """Rows of these indices, for the tokens at these positions, uint64, one each. Raises as the
        class does."""
        columns = {name: column[at] for name, column in self.columns.items()}
        return SampleRows(self.slots[at], columns, self.seeds[at], positions)

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> SampleRows:
        """Rows from arrays by their names, as `arrays` returns them. Raises as the class does."""
        columns = {name: arrays[name] for name in COLUMNS}
        return cls(arrays["slots"], columns, arrays["seeds"], arrays["positions"])

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays, by their names."""
        return {
            "slots": self.slots,
            **self.columns,
            "seeds": self.seeds,
            "positions": self.positions,
        }

    def check_logits(self, logits: torch.Tensor) -> None:
        """Raise ValueError unless `logits` have a row for each."""
        rows = logits.shape[0] if logits.dim() == 2 else -1
        if logits.dtype is not torch.float32 or rows != len(self) or logits.shape[1] == 0:
            raise ValueError(
                f"logits must be float32 of shape [{len(self)}, V], got {logits.dtype} "
                f"{list(logits.shape)}"
            )


@dataclass(slots=True, frozen=True)
class Batch:
    """A step on the device, as `Backend.prepare` made it: what models read of it.

    `token_ids` int64 [T] include pending tokens. `positions` int32 [T] and `logit_rows` int64 [S]
    are on the backend's device, too. `end_position` is above every position. Backends add what
    their kernels need.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    end_position: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """Result of `Backend.draw`."""

    token_ids: torch.Tensor
    """int64 `[S]` on the backend's device; 0 in rows that failed."""
    row_errors: Mapping[int, str] = field(default_factory=dict)
    """Maps a failed row to the reason why nothing could be drawn from it."""


def row_error(largest: float) -> str | None:
    """Reason why nothing can be drawn from a row with this largest logit (NaN if it has one)."""
    if math.isfinite(largest):
        return None
    if math.isnan(largest):
        return "the logits have a NaN"
    return "the logits have an infinity" if largest > 0 else NOTHING_LEFT


STATUS_ERRORS = tuple(map(row_error, (0.0, math.nan, math.inf, -math.inf)))
"""Reason why there is no token, or None, by the status of a row that a device drew from."""


def _check_fields(
    array_of: Callable[[str], npt.NDArray[Any]],
    fields: Sequence[ArrayField],
    sizes: Mapping[str, int],
) -> None:
    """Raise unless the array of each field has its dtype and shape, and is contiguous."""
    for name, dtype, dimensions, more in fields:
        array = array_of(name)
        shape = tuple([sizes[dimension] for dimension in dimensions])
        if more:
            shape = (*shape[:-1], shape[-1] + more)
        if array.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {array.dtype}")
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous, got strides {array.strides}")
