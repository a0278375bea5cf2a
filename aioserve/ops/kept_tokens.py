"""Tokens of a row of logits that may be drawn, in torch: temperature, top_k, top_p, min_p and
typical_p. `aioserve/sampling/sampler.py` defines them."""

from __future__ import annotations

import math

from torch import Tensor

from aioserve.ops.batch import SampleRows

__all__ = ["kept_tokens", "scaled"]


def scaled(row: Tensor, temperature: float) -> Tensor:
    """Divide a row of logits, float64 `[V]` with a finite largest, by a temperature above 0. The
    result has a largest of 0."""
    return (row - row.max()) / temperature


def kept_tokens(scores: Tensor, rows: SampleRows, index: int) -> Tensor | None:
    """Ids that may be drawn from a row of scaled logits, by falling logit: int64 `[kept]`. None if
    all may. The parameters are those of the row at `index`."""
    top_k, top_p = int(rows["top_k"][index]), float(rows["top_p"][index])
    min_p, typical_p = float(rows["min_p"][index]), float(rows["typical_p"][index])
    vocab = len(scores)
    if not 0 < top_k < vocab and top_p == typical_p == 1 and not min_p:
        return None
    order = scores.argsort(descending=True, stable=True)
    order = order[: top_k or vocab]
    if top_p < 1:
        ends = scores[order].exp().cumsum(0)
        order = order[: int((ends < top_p * ends[-1]).sum()) + 1]
    if min_p:
        order = order[scores[order] >= math.log(min_p)]
    if typical_p < 1:
        order = order[scores[order] > -math.inf]
        surprise = -scores[order].log_softmax(0)
        entropy = (surprise * surprise.neg().exp()).sum()
        distance = (surprise - entropy).abs()
        nearest = distance.argsort(stable=True)
        ends = scores[order][nearest].softmax(0).cumsum(0)
        last = min(int((ends < typical_p).sum()), len(nearest) - 1)
        order = order[distance <= distance[nearest[last]]]
    return order
