"""The value that tells every op of a step which token belongs where.

Knows shapes and devices; knows nothing about requests, page ownership or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["AttentionBatch"]


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """Where the query tokens of one step sit in their sequences and in the KV pages.

    The step computes T tokens of B sequences, laid out one sequence after the other. Row `i` of
    sequence `b` has position `context_lens[b] - (query_start[b + 1] - query_start[b]) + i`, which
    is what `positions` holds.

    Every tensor is contiguous and all are on one device:
        query_start   int32 [B + 1]  prefix sums of the query tokens per sequence
        context_lens  int32 [B]      tokens in the KV pages after this step's writes
        page_table    int32 [B, P]   pages in order of position; entries past the context are
                                     valid page ids whose contents are never used
        token_locations  int64 [T]   page * page_size + offset, where a token's K and V are written
        positions     int32 [T]
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    page_table: torch.Tensor
    token_locations: torch.Tensor
    positions: torch.Tensor
    max_query: int
    max_context: int
    # What a native kernel needs of this batch, read once per step instead of once per layer:
    # (device type, B, P, T, and the address of each tensor in the order above).
    layout: tuple[str, int, int, int, int, int, int, int, int] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        sequences = self.context_lens.shape[0] if self.context_lens.dim() == 1 else -1
        tokens = self.positions.shape[0] if self.positions.dim() == 1 else -1
        pages = self.page_table.shape[1] if self.page_table.dim() == 2 else -1
        expected = (
            ("query_start", self.query_start, torch.int32, (sequences + 1,)),
            ("context_lens", self.context_lens, torch.int32, (sequences,)),
            ("page_table", self.page_table, torch.int32, (sequences, pages)),
            ("token_locations", self.token_locations, torch.int64, (tokens,)),
            ("positions", self.positions, torch.int32, (tokens,)),
        )
        device = self.query_start.device
        for name, tensor, dtype, shape in expected:
            if tensor.dtype is not dtype:
                raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
            if tensor.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
            if tensor.device != device:
                raise ValueError(f"{name} must be on {device}, got {tensor.device}")
        addresses = [tensor.data_ptr() for _, tensor, _, _ in expected]
        layout = (device.type, sequences, pages, tokens, *addresses)
        object.__setattr__(self, "layout", layout)
