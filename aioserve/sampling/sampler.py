"""One token per row of logits.

Knows logits, sampling parameters, seeds and positions; must not know requests, plans or the scheduler.

Every row is worked out from its own numbers by operations whose result doesn't depend on the rows
around it (elementwise functions, sums in a fixed order, sorts of values), so a row's token is the same
in any batch. The work is done by numpy on the CPU: measured, its single-threaded passes over a row
that stays in cache beat torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from aioserve.errors import InvariantError
from aioserve.request import SamplingParams
from aioserve.sampling.philox import uniforms

__all__ = ["SampleResult", "sample"]

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]

_FOLD = 32
"""A row is summed and bounded by its residue classes modulo `ceil(vocab / _FOLD)`."""
_FIRST_CANDIDATES = 256
"""Most likely tokens tried first as a nucleus; a flatter row is sorted as far as it must be."""
_CHUNK_ELEMENTS = 2**18
"""Logits worked on at a time: 1 MiB in float32, so that the passes over them stay in cache."""
_LARGEST = float(np.finfo(np.float32).max)


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

    `temperature` 0 takes the largest logit, the lowest id among equals. Otherwise logits are divided
    by `temperature`; `top_k` keeps that many largest; `top_p` keeps the smallest set of the largest
    remaining ones whose probabilities, renormalised after `top_k`, reach it, the token that crosses it
    included (Holtzman et al., "The curious case of neural text degeneration", 2020). Among equal
    logits lower ids come first. One uniform number, a function of the row's seed and position,
    then picks from the kept tokens by inverting their cumulative distribution.

    A row with a NaN or +inf, or with nothing but -inf, is reported in `row_errors` and disturbs no other.
    Raises `InvariantError` if shapes or dtypes don't fit.
    """
    _check(logits, params, seeds, positions)
    num_rows = logits.shape[0]
    if num_rows == 0:
        return SampleResult(torch.empty(0, dtype=torch.int64))
    rows: Floats = logits.numpy()
    best = rows.argmax(axis=1)
    largest = rows[np.arange(num_rows), best]
    token_ids = best.astype(np.int64, copy=False)
    errors: dict[int, str] = {}
    # argmax stops at the first NaN, so the largest value tells of every kind of bad row.
    if not np.isfinite(largest).all():
        errors = {int(row): _error(largest[row]) for row in np.flatnonzero(~np.isfinite(largest))}
        token_ids[list(errors)] = 0
    drawn = [i for i in range(num_rows) if params[i].temperature > 0 and i not in errors]
    if drawn:
        noise = uniforms([seeds[i] for i in drawn], [positions[i] for i in drawn])
        step = max(1, _CHUNK_ELEMENTS // rows.shape[1])
        for start in range(0, len(drawn), step):
            chunk = drawn[start : start + step]
            token_ids[chunk] = _draw(
                rows, largest, chunk, [params[i] for i in chunk], noise[start : start + step]
            )
    return SampleResult(torch.from_numpy(token_ids), errors)


def _draw(
    rows: Floats, largest: Floats, chunk: list[int], params: list[SamplingParams], noise: Floats
) -> Ints:
    """Token ids for the rows of `rows` that `chunk` names; `params` and `noise` are aligned to it."""
    vocab = rows.shape[1]
    top_k = np.array([p.top_k if p.top_k < vocab else 0 for p in params], dtype=np.int64)
    top_p = np.array([p.top_p for p in params])
    scaled = _scale(rows, largest, chunk, np.array([p.temperature for p in params]))
    plain = (top_k == 0) & (top_p >= 1)
    token_ids = np.empty(len(chunk), dtype=np.int64)
    if plain.any():
        token_ids[plain] = _draw_from_all(scaled if plain.all() else scaled[plain], noise[plain])
    if not plain.all():
        some = ~plain
        token_ids[some] = _draw_from_top(
            scaled if some.all() else scaled[some], top_k[some], top_p[some], noise[some], vocab
        )
    return token_ids


def _scale(rows: Floats, largest: Floats, chunk: list[int], temperature: Floats) -> Floats:
    """(logits - largest) / temperature, padded with -inf to a multiple of `_FOLD` columns.

    float32 `[len(chunk), padded]`, at most 0. A quotient below float32's range is -inf: nothing is lost,
    its weight is 0.
    """
    vocab = rows.shape[1]
    scaled = np.empty((len(chunk), -(-vocab // _FOLD) * _FOLD), dtype=np.float32)
    scaled[:, vocab:] = -np.inf
    with np.errstate(over="ignore", divide="ignore"):
        factors = np.minimum(1.0 / temperature, _LARGEST).astype(np.float32)
        for to, row in enumerate(chunk):
            np.subtract(rows[row], largest[row], out=scaled[to, :vocab])
            np.multiply(scaled[to, :vocab], factors[to], out=scaled[to, :vocab])
    return scaled


def _draw_from_all(scaled: Floats, noise: Floats) -> Ints:
    """Invert the cumulative distribution over whole rows, in two levels and without sorting.

    First over the sums of the residue classes, then inside the class that was hit.
    """
    num_rows = scaled.shape[0]
    weights = np.exp(scaled).reshape(num_rows, _FOLD, -1)
    class_ends = weights.sum(axis=1).cumsum(axis=1, dtype=np.float64)
    target = noise * class_ends[:, -1]
    which = _first_above(class_ends, target)
    each = np.arange(num_rows)
    begin = np.where(which > 0, class_ends[each, which - 1], 0.0)
    part = (target - begin) / (class_ends[each, which] - begin)
    ends = weights[each, :, which].cumsum(axis=1, dtype=np.float64)
    # Rounding may bring the part of the class up to 1, which no end is above.
    inside = np.minimum(part * ends[:, -1], np.nextafter(ends[:, -1], 0))
    return _first_above(ends, inside) * weights.shape[2] + which


def _draw_from_top(scaled: Floats, top_k: Ints, top_p: Floats, noise: Floats, vocab: int) -> Ints:
    """Draw from what `top_k` and `top_p` keep; each row restricts by at least one of them."""
    num_rows = scaled.shape[0]
    totals = np.full(num_rows, np.nan)
    by_mass = top_k == 0
    if by_mass.any():
        weights = np.exp(scaled if by_mass.all() else scaled[by_mass])
        folded = weights.reshape(len(weights), _FOLD, -1).sum(axis=1)
        totals[by_mass] = folded.sum(axis=1, dtype=np.float64)
    floors = _floors(scaled, np.where(by_mass, _FIRST_CANDIDATES, top_k))
    token_ids, enough = _pick(scaled, floors, top_k, top_p, totals, noise)
    if not enough.all():
        flat = ~enough
        # All tokens below this floor together weigh less than 1 - top_p, so none is in the nucleus;
        # a little lower still, since the weights are rounded.
        floors = np.log(np.maximum((1 - top_p[flat]) * totals[flat] / vocab, 1e-300)) - 1e-3
        token_ids[flat], _ = _pick(
            scaled[flat], floors, top_k[flat], top_p[flat], totals[flat], noise[flat]
        )
    return token_ids


def _floors(scaled: Floats, counts: Ints) -> Floats:
    """A value per row that at least `counts` of its entries reach, and not many more.

    The n-th largest of the residue classes' maxima: n classes have an entry that reaches it.
    """
    maxima = scaled.reshape(scaled.shape[0], _FOLD, -1).max(axis=1)
    num_classes = maxima.shape[1]
    floors = np.full(len(counts), -_LARGEST)
    for count in np.unique(counts):
        if count <= num_classes:
            where = np.flatnonzero(counts == count)
            kth = num_classes - count
            floors[where] = np.partition(maxima[where], kth, axis=1)[:, kth]
    return np.maximum(floors, -_LARGEST)


def _pick(
    scaled: Floats, floors: Floats, top_k: Ints, top_p: Floats, totals: Floats, noise: Floats
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Draw among the entries at or above `floors`: token ids, and whether the entries sufficed.

    They don't where a nucleus of a whole row (total weight `totals`) reaches below its floor; such a
    row's id means nothing. Only values are sorted; the id comes from the rank among equal values.
    """
    num_rows = scaled.shape[0]
    above = scaled >= floors.astype(np.float32)[:, None]
    counts = above.sum(axis=1)
    values = np.full((num_rows, int(counts.max())), np.inf, dtype=np.float32)
    np.negative(scaled[above], out=(flat := np.empty(int(counts.sum()), dtype=np.float32)))
    values[np.arange(values.shape[1]) < counts[:, None]] = flat
    values.sort(axis=1)
    np.negative(values, out=values)
    weights = np.exp(values.astype(np.float64))
    ranks = np.arange(values.shape[1])
    weights[(top_k > 0)[:, None] & (ranks >= top_k[:, None])] = 0.0
    ends = weights.cumsum(axis=1)
    totals = np.where(top_k > 0, ends[:, -1], totals)
    mass = np.where(top_p < 1, top_p * totals, np.inf)
    enough = (top_k > 0) | (ends[:, -1] >= mass)
    each = np.arange(num_rows)
    # The nucleus ends with the first token whose cumulative weight reaches the mass.
    last = np.minimum((ends < mass[:, None]).sum(axis=1), values.shape[1] - 1)
    chosen = _first_above(ends, noise * ends[each, last])
    token_ids = np.empty(num_rows, dtype=np.int64)
    for row in range(num_rows):
        value = values[row, chosen[row]]
        rank = chosen[row] - int(np.argmax(values[row] == value))
        token_ids[row] = np.flatnonzero(scaled[row] == value)[rank]
    return token_ids, enough


def _first_above(ends: Floats, targets: Floats) -> Ints:
    """Index per row of the first entry of a non-decreasing row that is above the row's target."""
    return (ends <= targets[:, None]).sum(axis=1)


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
