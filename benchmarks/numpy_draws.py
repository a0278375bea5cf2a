"""What draws took before they were native: one row of logits and one uniform number make a token.

The measure of `benchmarks/sampling.py`. Knows numpy alone. Nothing here sorts a whole row:

- without `top_k` and `top_p` the cumulative distribution is inverted in two levels, over the sums
  of interleaved parts of the row first, and inside one part then;
- with them a cheap bound first leaves the entries that can matter. If these are many they are
  spread over buckets by falling logit, whose counts and weights tell in which bucket the k-th
  entry, the end of the nucleus and the drawn token are. Only those are sorted.

Weights are float32 like the logits, sums of them float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["RowSampler"]

Floats = npt.NDArray[np.floating]
Ids = npt.NDArray[np.int64]

LINES = 32
"""A row is taken as a matrix of this many lines; its columns are summed or bounded at once."""
_BUCKETS = 2048
_SORTED_AT_ONCE = 512
"""Up to this many entries go into a single bucket."""
_WIDEST_LOGITS = 64.0
"""Range of logits that the buckets tell apart if the smallest is -inf."""
_LARGEST = float(np.finfo(np.float32).max)


class RowSampler:
    """Draws from rows of `vocab` logits, reusing its buffers. Not thread-safe."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        padded = -(-vocab // LINES) * LINES
        self._padded_gaps = np.full(padded, np.inf, dtype=np.float32)
        self._padded_weights = np.zeros(padded, dtype=np.float32)
        self._gaps = self._padded_gaps[:vocab]
        self._weights = self._padded_weights[:vocab]

    def draw(
        self,
        row: Floats,
        largest: float,
        uniform: float,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
    ) -> int:
        """A token id for `row`, float32 `[vocab]` with the finite maximum `largest`.

        `uniform` is in [0, 1); `temperature` is above 0. Doesn't change `row`.
        """
        factor = np.float32(-min(1.0 / temperature, _LARGEST))
        # A gap or product past float32's range is infinite, and rightly so: its weight is 0.
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(np.float32(largest), row, out=self._gaps)
            if 0 < top_k < self.vocab:
                ids, mass = self._nearest(top_k), None
            else:
                np.multiply(self._gaps, factor, out=self._weights)
                np.exp(self._weights, out=self._weights)
                ends = self._padded_weights.reshape(LINES, -1).sum(axis=0).cumsum(dtype=np.float64)
                if top_p >= 1:
                    return self._draw_from_all(ends, uniform)
                ids, mass = self._likely(top_p, float(ends[-1]))
            ranked = _Ranked(ids, row[ids], self._gaps[ids], factor)
        if mass is None:
            ranked.keep_largest(top_k)
            mass = top_p * ranked.total
        if top_p < 1:
            ranked.keep_nucleus(mass)
        return ranked.draw(uniform)

    def _draw_from_all(self, column_ends: Floats, uniform: float) -> int:
        lines = self._padded_weights.reshape(LINES, -1)
        target = uniform * float(column_ends[-1])
        column = int(column_ends.searchsorted(target, side="right"))
        begin = float(column_ends[column - 1]) if column else 0.0
        part = (target - begin) / (float(column_ends[column]) - begin)
        ends = lines[:, column].cumsum(dtype=np.float64)
        return _first_above(ends, part * float(ends[-1])) * lines.shape[1] + column

    def _nearest(self, count: int) -> Ids:
        """Ids of at least the `count` largest logits with all their equals, and of not many more.

        `count` columns have an entry at or above the `count`-th largest of the columns' maxima.
        """
        columns = self._padded_gaps.reshape(LINES, -1).min(axis=0)
        if count > len(columns):
            return np.arange(self.vocab)
        floor = np.partition(columns, count - 1)[count - 1]
        return np.flatnonzero(self._gaps <= floor)

    def _likely(self, share: float, total: float) -> tuple[Ids, float]:
        """Ids that hold the nucleus of `share`, and the weight that it has to reach.

        Entries below (1 - share) * total / vocab weigh less than 1 - share of the whole even
        together, so the nucleus is complete without them. The bound is lowered by far more
        than sums of float32 weights are off.
        """
        floor = 0.99 * (1 - share) * total / self.vocab
        return np.flatnonzero(self._weights >= np.float32(floor)), share * total


class _Ranked:
    """Entries of a row by falling logit and rising id, sorted only where they are looked at.

    An entry's bucket grows with its gap to the largest logit, so buckets are in rank order. What is
    kept is a beginning of that order: `_ends`, the weight up to each bucket's end, stops there.
    """

    def __init__(self, ids: Ids, logits: Floats, gaps: Floats, factor: np.float32) -> None:
        self._ids = ids
        self._logits = logits
        self._weights = np.exp(gaps * factor)
        self._num_buckets = _BUCKETS if len(ids) > _SORTED_AT_ONCE else 1
        self._buckets = _bucket_of(gaps, self._num_buckets)
        self._ends = np.bincount(
            self._buckets, weights=self._weights, minlength=self._num_buckets
        ).cumsum()

    @property
    def total(self) -> float:
        """Weight of the entries that are kept."""
        return float(self._ends[-1])

    def keep_largest(self, count: int) -> None:
        """Drop all but the first `count` entries; there are as many."""
        count_ends = np.bincount(self._buckets, minlength=self._num_buckets).cumsum()
        bucket = int(count_ends.searchsorted(count))
        before = int(count_ends[bucket - 1]) if bucket else 0
        _, ends = self._entries(bucket)
        self._ends[bucket:] = ends[count - before - 1]

    def keep_nucleus(self, mass: float) -> None:
        """Drop all behind the first entry with which the weights reach `mass`."""
        mass = min(mass, self.total)
        bucket = int(self._ends.searchsorted(mass))
        _, ends = self._entries(bucket)
        self._ends[bucket:] = ends[min(int(ends.searchsorted(mass)), len(ends) - 1)]

    def draw(self, uniform: float) -> int:
        """Id of the entry at `uniform` of the kept entries' cumulative distribution."""
        target = uniform * self.total
        bucket = int(self._ends.searchsorted(target, side="right"))
        ids, ends = self._entries(bucket)
        return int(ids[_first_above(ends, target)])

    def _entries(self, bucket: int) -> tuple[Ids, Floats]:
        """Ids of a bucket's entries in rank order, and the row's weight up to each."""
        members = np.flatnonzero(self._buckets == bucket)
        members = members[np.argsort(-self._logits[members], kind="stable")]
        ends = self._weights[members].cumsum(dtype=np.float64)
        if bucket:
            ends += self._ends[bucket - 1]
        return self._ids[members], ends


def _bucket_of(gaps: Floats, num_buckets: int) -> Ids:
    """int64 `[len(gaps)]`, below `num_buckets` and never falling with the gap."""
    if num_buckets == 1:
        return np.zeros(len(gaps), dtype=np.int64)
    widest = float(gaps.max())
    if not np.isfinite(widest):
        widest = _WIDEST_LOGITS
    scale = min((num_buckets - 1) / widest, _LARGEST) if widest > 0 else 0.0
    # fmin: an infinite gap times a scale of 0 is a NaN.
    return np.fmin(gaps * np.float32(scale), np.float32(num_buckets - 1)).astype(np.int64)


def _first_above(ends: Floats, target: float) -> int:
    """Index of the first entry of a non-decreasing row that exceeds `target`.

    Where rounding left `target` at or past the end: the last entry that made a difference.
    """
    index = int(ends.searchsorted(target, side="right"))
    return index if index < len(ends) else int(ends.searchsorted(ends[-1]))
