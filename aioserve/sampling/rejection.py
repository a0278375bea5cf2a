"""Rejection sampling of draft tokens: the result has the target's distribution, whatever the
draft's is.

A draft token x drawn from q is kept with the probability min(1, p(x) / q(x)). Otherwise a token is
drawn from max(p - q, 0), normalised. See Leviathan, Kalman and Matias, "Fast inference from
transformers via speculative decoding", ICML 2023, section 2.3, with the proof in appendix A.1. A
draft token is kept with probability sum(min(p, q)), which no other rule exceeds.

The race of a position has drawn the draft token, and its numbers say much about that token. What is
decided here uses other numbers (`aioserve.ops.philox.second_draws`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.ops import Backend, SampleRows
from aioserve.ops.philox import second_draws
from aioserve.sampling_params import DRAWN_FREELY

__all__ = ["tokens_by_rejection"]

Rows = npt.NDArray[np.float32]
Keys = npt.NDArray[np.uint64]


def tokens_by_rejection(
    backend: Backend, p: Tensor, q: Tensor, draft_tokens: Tensor, rows: SampleRows
) -> Tensor:
    """Return a token for each of R rows, on the CPU: its draft token if that is kept, else another
    one; int64 `[R]`.

    Probabilities of the target and of the draft, after temperature and limits, are `p` and `q`,
    float32 `[R, V]`. The draft tokens, drawn from `q`, are `draft_tokens`, int64 `[R]`. Seeds and
    positions are those of `rows`. A slot's rows follow each other, each as if the draft tokens
    before it were kept. After the first one that isn't, the draft tokens are returned undecided.
    """
    numbers, seeds = second_draws(rows.seeds, rows.positions)
    at = draft_tokens[:, None]
    draft_p, draft_q = (each.gather(1, at)[:, 0].double().numpy() for each in (p, q))
    # A draft token that the target leaves out is never kept.
    wrong = np.flatnonzero(numbers * draft_q >= draft_p)
    _, firsts = np.unique(rows.slots[wrong], return_index=True)
    tokens = draft_tokens.clone()
    if len(firsts):
        redrawn = wrong[firsts]
        rest = _rest(p.numpy()[redrawn], q.numpy()[redrawn])
        tokens[redrawn] = _drawn(backend, rest, seeds[redrawn], rows.positions[redrawn])
    return tokens


def _rest(p: Rows, q: Rows) -> Rows:
    """Weights to draw from in place of a rejected draft token, not normalised: float32 `[N, V]`."""
    rest = np.maximum(p - q, 0)
    # Nothing may be left of two that are equal up to rounding.
    same = ~rest.any(axis=1)
    rest[same] = p[same]
    return rest


def _drawn(backend: Backend, weights: Rows, seeds: Keys, positions: Keys) -> Tensor:
    """Draw a token for each row by its weights: int64 `[N]`."""
    with np.errstate(divide="ignore"):
        logits = torch.from_numpy(np.log(weights))
    count = len(weights)
    slots = np.zeros(count, np.int64)
    rows = SampleRows.alike(DRAWN_FREELY, slots, seeds=seeds, positions=positions)
    return backend.draw(logits, rows, backend.allocate_slots(1)).token_ids
