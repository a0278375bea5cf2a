"""Rejection sampling of guesses: what is kept of them, and what is drawn instead, has the target's
distribution whatever the draft's is.

A guess x that was drawn from q is kept with the probability min(1, p(x) / q(x)); where it isn't, a
token is drawn from max(p - q, 0), normalised (Leviathan, Kalman and Matias, "Fast inference from
transformers via speculative decoding", ICML 2023, section 2.3; proof in its appendix A.1). It is
kept with probability sum(min(p, q)), which no other rule exceeds.

A guess is drawn by its position's race, so what is decided here is drawn by numbers of its own
(`aioserve.ops.philox.second_draws`): those of the race say much about which guess there is.
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
    backend: Backend, p: Tensor, q: Tensor, guesses: Tensor, rows: SampleRows
) -> Tensor:
    """A token for each of R rows, on the CPU: its guess where that is kept, else another one; int64
    `[R]`.

    `p` and `q`, float32 `[R, V]`, are probabilities of the target and of the draft, as temperature
    and limits leave them; `guesses`, int64 `[R]`, were drawn from the latter; seeds and positions
    are those of `rows`. A slot's rows follow each other, each as if the guesses before it were
    kept, so behind the first that isn't nothing is decided: the guesses are given there.
    """
    numbers, seeds = second_draws(rows.seeds, rows.positions)
    at = guesses[:, None]
    guess_p, guess_q = (each.gather(1, at)[:, 0].double().numpy() for each in (p, q))
    # A guess that the target leaves out is never kept.
    wrong = np.flatnonzero(numbers * guess_q >= guess_p)
    _, firsts = np.unique(rows.slots[wrong], return_index=True)
    tokens = guesses.clone()
    if len(firsts):
        redrawn = wrong[firsts]
        rest = _rest(p.numpy()[redrawn], q.numpy()[redrawn])
        tokens[redrawn] = _drawn(backend, rest, seeds[redrawn], rows.positions[redrawn])
    return tokens


def _rest(p: Rows, q: Rows) -> Rows:
    """What is drawn from in place of a guess that isn't kept, not normalised: float32 `[N, V]`."""
    rest = np.maximum(p - q, 0)
    # Of two that are the same up to rounding nothing may be left.
    same = ~rest.any(axis=1)
    rest[same] = p[same]
    return rest


def _drawn(backend: Backend, weights: Rows, seeds: Keys, positions: Keys) -> Tensor:
    """A token of each row by its weights: int64 `[N]`."""
    with np.errstate(divide="ignore"):
        logits = torch.from_numpy(np.log(weights))
    count = len(weights)
    slots = np.zeros(count, np.int64)
    rows = SampleRows.alike(DRAWN_FREELY, slots, seeds=seeds, positions=positions)
    return backend.draw(logits, rows, backend.allocate_slots(1)).token_ids
