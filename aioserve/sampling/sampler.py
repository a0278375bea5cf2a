"""One token per row of logits.

Knows logits, sampling parameters, seeds and positions; must not know requests, plans or the
scheduler.

A row that samples is worked out by itself, in the same operations whatever its neighbours and its
place in memory, so its token is the same in any batch. The work is done by numpy on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from aioserve.errors import InvariantError
from aioserve.request import SamplingParams
from aioserve.sampling.philox import uniforms
from aioserve.sampling.row import RowSampler

__all__ = ["SampleResult", "sample"]


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What `sample` drew."""

    token_ids: torch.Tensor
    """int64 `[S]`, on the CPU; 0 in rows that failed."""
    row_errors: dict[int, str] = field(default_factory=dict)
    """Row -> why nothing could be drawn from it."""


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> SampleResult:
    """Draw a token from each row of `logits`, float32 `[S, V]` on the CPU with any strides.

    `temperature` 0 takes the largest logit, the lowest id among equals. Otherwise logits are
    divided by `temperature`; `top_k` keeps that many largest; `top_p` keeps the smallest set of the
    largest remaining ones whose probabilities, renormalised after `top_k`, reach it, so the token
    that crosses it stays (Holtzman et al., "The curious case of neural text degeneration", ICLR
    2020).
    Among equal logits lower ids come first. Then one uniform number, a function of the row's
    seed and position alone, picks a kept token by inverting the cumulative distribution.

    A row with a NaN or +inf, or with nothing but -inf, is reported in `row_errors` and disturbs no
    other. Raises `InvariantError` if shapes or dtypes don't fit. Doesn't change `logits`.
    """
    _check(logits, params, seeds, positions)
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return SampleResult(torch.empty(0, dtype=torch.int64))
    rows = logits.numpy()
    token_ids = rows.argmax(axis=1)
    # argmax stops at the first NaN, so the value it finds tells of every kind of bad row.
    largest = rows[np.arange(num_rows), token_ids]
    errors: dict[int, str] = {}
    if not np.isfinite(largest).all():
        errors = {int(row): _error(largest[row]) for row in np.flatnonzero(~np.isfinite(largest))}
        token_ids[list(errors)] = 0
    drawn = [i for i in range(num_rows) if params[i].temperature > 0 and i not in errors]
    if drawn:
        noise = uniforms([seeds[i] for i in drawn], [positions[i] for i in drawn])
        sampler = RowSampler(vocab)
        for i, uniform in zip(drawn, noise.tolist(), strict=True):
            token_ids[i] = sampler.draw(rows[i], largest[i], params[i], uniform)
    return SampleResult(torch.from_numpy(token_ids), errors)


def _error(largest: float) -> str:
    if np.isnan(largest):
        return "the logits have a NaN"
    return "the logits have an infinity" if largest > 0 else "all logits are -inf"


def _check(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[1] == 0:
        raise InvariantError(
            f"logits must be float32 [S, V], got {logits.dtype} {list(logits.shape)}"
        )
    lengths = (logits.shape[0], len(params), len(seeds), len(positions))
    if len(set(lengths)) != 1:
        raise InvariantError(
            "logits, params, seeds and positions must have the same number of rows, got "
            f"{', '.join(map(str, lengths))}"
        )
