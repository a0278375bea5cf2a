"""What one forward pass computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioserve.ops.types import AttentionBatch

__all__ = ["ForwardBatch"]


@dataclass(slots=True, frozen=True)
class ForwardBatch:
    """T tokens of some sequences, laid out one sequence after the other.

    token_ids    int64 [T]
    attention    where the tokens sit in their sequences and in the KV pages
    sample_rows  int64 [S]  rows of T whose logits are wanted; S may be 0
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    sample_rows: torch.Tensor
