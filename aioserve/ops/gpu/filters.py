"""`min_p` and `typical_p` applied to rows of logits, in torch's own operations.

Rows that ask for either are sorted whole, and `top_k` and `top_p` are applied here too, in their
order. Nothing is read back, so it may be part of a graph. The kernels of `sampling` draw from the
result. A few rows are taken at a time, so memory doesn't grow with the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["filtered"]

ROWS_AT_ONCE = 8


def filtered(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    typical_ps: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, top_ks and top_ps that have the same effect without `min_ps` and `typical_ps`.

    Rows that ask for neither, are greedy or have no finite largest logit stay unchanged.
    """
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    asks = ((min_ps > 0) | (typical_ps < 1)) & (temperatures > 0)
    for begin in range(0, logits.shape[0], ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        some = logits[rows]
        largest = some.amax(1, keepdim=True)
        left = _left(
            # Rows that ask for neither divide by 1.
            (some.double() - largest) / torch.where(asks, temperatures, 1.0)[rows, None],
            *(each[rows, None] for each in (top_ks, top_ps, min_ps, typical_ps)),
        )
        stays = left | ~(asks[rows, None] & largest.isfinite())
        out[rows] = torch.where(stays, some, -math.inf)
    return out, torch.where(asks, 0, top_ks), torch.where(asks, 1.0, top_ps)


def _left(
    scores: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, typical_ps: Tensor
) -> Tensor:
    """True for tokens that are kept: bool `[C, V]`. `scores`, float64, have a largest of 0 in each
    row; others are `[C, 1]`."""
    vocab = scores.shape[1]
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=scores.device)
    kept = (ranks < torch.where(top_ks > 0, top_ks, vocab)) & (ranked > -math.inf)
    weights = torch.where(kept, ranked.exp(), 0.0)
    ends = weights.cumsum(1)
    reached = ends.roll(1, 1) >= top_ps * ends[:, -1:]
    reached[:, 0] = False
    kept &= ~reached | (top_ps == 1)
    kept &= ranked >= min_ps.log()

    weights = torch.where(kept, ranked.exp(), 0.0)
    total = weights.sum(1, keepdim=True)
    # The distance of -log(p) from its mean, the entropy, equals that of the score from its mean.
    mean = (weights * torch.where(kept, ranked, 0.0)).sum(1, keepdim=True) / total
    distance = torch.where(kept, (ranked - mean).abs(), math.inf)
    nearest, at = distance.sort(dim=1, stable=True)
    before = (weights.gather(1, at).cumsum(1) < typical_ps * total).sum(1, keepdim=True)
    widest = nearest.gather(1, before.clamp(max=vocab - 1))
    kept &= (distance <= widest) | (typical_ps == 1)
    return torch.empty_like(kept).scatter_(1, order, kept)
