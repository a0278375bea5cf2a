"""Gaps that are counted while a run goes on: between the tokens of each completion, and between the
service of tenants.

Completions in a step get their tokens at its end, so those that were in the step before share one
gap. Stored are that gap and the number of completions: two numbers a step, and two for each running
completion.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError

__all__ = ["ServiceGap", "Spread", "TokenGaps", "quantile", "spread_of", "weighted_spread"]

MAX_PAIRS = 1 << 26
"""Most pairs of tenants, of 8 bytes each."""


class Spread(msgspec.Struct, frozen=True):
    """Spread of some values; percentiles are interpolated linearly."""

    mean: float
    """Mean of the values that came."""
    p50: float
    p90: float
    p99: float
    max: float
    never: int = 0
    """Number of values that never came, since their requests were refused. Percentiles and `max`
    count each as infinite, so refusing requests never improves them.
    """


def spread_of(values: Iterable[float | None], *, never: int = 0) -> Spread | None:
    """Return the spread of the values that aren't None, and of `never` infinite ones; None without
    any.
    """
    known = np.array([value for value in values if value is not None], np.float64)
    return weighted_spread(known, np.ones(len(known), np.int64), never=never)


def weighted_spread(
    values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], *, never: int = 0
) -> Spread | None:
    """Return the spread as `spread_of`, with a count for each value."""
    order = np.argsort(values)
    ordered, often = values[order], counts[order]
    came = int(counts.sum())
    if not came + never:
        return None
    mean = float(values @ counts) / came if came else math.inf
    found = (quantile(ordered, s, counts=often, missing=never) for s in (0.5, 0.9, 0.99, 1.0))
    return Spread(mean, *(math.inf if value is None else value for value in found), never=never)


def quantile(
    values: npt.NDArray[np.float64] | Sequence[float],
    share: float,
    *,
    counts: npt.NDArray[np.int64] | None = None,
    missing: int = 0,
) -> float | None:
    """Return the value that this share of all does not exceed.

    It is interpolated linearly, as `numpy.percentile` does.

    - `values` are in ascending order.
    - `counts` are the number of each value; 1 unless given.
    - `missing` is a number of further values, larger than all. None is returned if the result is
      among them.
    """
    upto = np.arange(1, len(values) + 1) if counts is None else np.cumsum(counts)
    known = int(upto[-1]) if len(upto) else 0
    place = share * (known + missing - 1)
    low, high = math.floor(place), math.ceil(place)
    if high >= known and place % 1 < 1e-9:  # only rounded up
        high = low
    if not known or high >= known:
        return None
    places = np.searchsorted(upto, (low, high), side="right").tolist()
    below, above = (float(values[place]) for place in places)
    return below if below == above else below + (above - below) * (place % 1)


class TokenGaps:
    """Gaps of one run. Steps with the same completions may be added at once or one by one."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._counts = array("q")
        """Number of times that each of `_seconds` was a gap."""
        self._last: dict[int, float] = {}
        """Time of the last token of each completion that isn't in `_since`."""
        self._longest: dict[int, float] = {}
        """Longest gap of each completion; of those in `_since`, until they joined it."""
        self._since: dict[int, int] = {}
        """Completions of the last step, with the number of the first gap that each has shared."""
        self._together: Sequence[int] = ()
        """Completions of the last step, in the order in which they were added."""
        self._end = 0.0
        """End of the last step."""
        self._num_shared = 0
        """Number of shared gaps: gaps of all completions of a step but the new ones."""
        self._peaks: list[tuple[int, float]] = []
        """Number and length of each shared gap that no later one has reached."""

    def add(self, sequence_ids: Sequence[int], ends: Sequence[float]) -> None:
        """Add one token of each sequence at each of these ends, which ascend and follow earlier
        ones.
        """
        if not sequence_ids or not ends:
            return
        if sequence_ids != self._together:
            self._change(list(sequence_ids), ends[0])
            ends = ends[1:]
        if ends:
            gaps = [end - before for before, end in pairwise((self._end, *ends))]
            self._seconds.extend(gaps)
            self._counts.extend([len(self._together)] * len(gaps))
            self._share(max(gaps))
            self._end = ends[-1]

    def ended(self, sequence_id: int) -> float | None:
        """Return the longest gap of a completion that gets no more tokens; None with fewer than
        two.
        """
        if sequence_id in self._since:
            self._part(sequence_id)
            self._together = ()
        self._last.pop(sequence_id, None)
        return self._longest.pop(sequence_id, None)

    def spread(self) -> Spread | None:
        """Return the spread of all gaps of all completions."""
        return weighted_spread(*self.counted())

    def counted(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the gaps of all completions in seconds, in no order, and the count of each."""
        return np.array(self._seconds, np.float64), np.array(self._counts, np.int64)

    def _change(self, sequence_ids: list[int], end: float) -> None:
        """Begin a step with these completions, of which some may have had tokens before."""
        since, last = self._since, self._last
        for sequence_id in since.keys() - set(sequence_ids):
            self._part(sequence_id)
        before = Counter([self._end if one in since else last.get(one) for one in sequence_ids])
        for came, count in before.items():
            if came is not None:
                self._count(end - came, count)
        if since:
            self._share(end - self._end)
        for sequence_id in sequence_ids:
            if sequence_id not in since:
                since[sequence_id] = self._num_shared
                came = last.pop(sequence_id, end)
                if came < end:
                    longest = self._longest.get(sequence_id, 0.0)
                    self._longest[sequence_id] = max(longest, end - came)
        self._together, self._end = sequence_ids, end

    def _part(self, sequence_id: int) -> None:
        """Record for a completion of the last step the longest gap that it shared."""
        since = self._since.pop(sequence_id)
        self._last[sequence_id] = self._end
        if since < self._num_shared:
            _, shared = self._peaks[bisect_left(self._peaks, (since, 0.0))]
            self._longest[sequence_id] = max(self._longest.get(sequence_id, 0.0), shared)

    def _share(self, seconds: float) -> None:
        peaks = self._peaks
        while peaks and peaks[-1][1] <= seconds:
            peaks.pop()
        peaks.append((self._num_shared, seconds))
        self._num_shared += 1

    def _count(self, seconds: float, count: int) -> None:
        self._seconds.append(seconds)
        self._counts.append(count)


class ServiceGap:
    """Largest difference in service, in tokens, between two tenants over a time in which both
    always waited.

    Sheng et al. ("Fairness in Serving LLMs", OSDI 2024) bound it for backlogged tenants. A tenant
    without waiting requests gets less because it asks for less, so that time doesn't count.

    Time and memory grow with pairs of tenants that wait at once, one of them served since it began
    to wait. While a tenant is served nothing, its lead over others is least now, so nothing is
    stored for it.
    """

    def __init__(self) -> None:
        self.most: int = 0
        self._columns = _Slots()
        """Columns of the tenants that wait."""
        self._rows = _Slots()
        """Rows of the waiting tenants that were served since they began to wait."""
        self._tokens = np.zeros(1, np.int64)
        """Tokens computed for a tenant since it began to wait, by column."""
        self._least = np.zeros((1, 1), np.int64)
        """Least lead of one tenant over another while both waited, up to the last step that served
        the first, by row and column.
        """

    def step(
        self, served: Iterable[tuple[str, int]], waiting: Iterable[str], times: int = 1
    ) -> None:
        """Count `times` equal steps, each of which computed these tokens for each tenant.

        The tenants `waiting` still wait after them. Raises `ConfigError` for more than `MAX_PAIRS`
        pairs of tenants at once.
        """
        waits = frozenset(waiting)
        for tenant in self._columns.keys() - waits:
            self._columns.give_back(tenant)
            if tenant in self._rows:
                self._rows.give_back(tenant)
        for tenant in waits - self._columns.keys():
            self._begin_to_wait(tenant)
        gained = Counter[str]()
        for tenant, tokens in served:
            if tenant in waits and tokens:
                gained[tenant] += tokens
        for tenant in gained.keys() - self._rows.keys():
            self._be_served(tenant)
        if not gained:
            return
        self._count(gained)
        if times > 1:
            # A growing lead is largest after the last of them, a falling one after the first.
            self._tokens[[self._columns[tenant] for tenant in gained]] += _array(
                tokens * (times - 2) for tokens in gained.values()
            )
            self._count(gained)

    def _begin_to_wait(self, tenant: str) -> None:
        column = self._columns.take(tenant)
        if column == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._grow(axis=1)
        self._tokens[column] = 0
        served = _array(self._columns[tenant] for tenant in self._rows)
        self._least[_array(self._rows.values()), column] = self._tokens[served]

    def _be_served(self, tenant: str) -> None:
        row = self._rows.take(tenant)
        if row == len(self._least):
            self._grow(axis=0)
        self._least[row] = 0

    def _grow(self, axis: int) -> None:
        if 2 * self._least.size > MAX_PAIRS:
            raise ConfigError(
                f"trace: {len(self._columns)} tenants wait at once, and {len(self._rows)} of them "
                f"have been served; the gap is counted between at most {MAX_PAIRS} pairs: give "
                "fewer tenants, or a lower rate"
            )
        self._least = np.concatenate((self._least, np.zeros_like(self._least)), axis=axis)

    def _count(self, gained: Counter[str]) -> None:
        """Count the tokens that a step computed for tenants that have rows.

        Their leads have only fallen since they were last served. So they are least right before
        this step, or were earlier.
        """
        tokens = self._tokens
        columns = _array(self._columns.values())
        mine = _array(self._columns[tenant] for tenant in gained)
        pairs = np.ix_(_array(self._rows[tenant] for tenant in gained), columns)
        before = np.subtract.outer(tokens[mine], tokens[columns])
        least = self._least[pairs] = np.minimum(self._least[pairs], before)
        tokens[mine] += _array(gained.values())
        after = np.subtract.outer(tokens[mine], tokens[columns])
        self.most = max(self.most, int((after - least).max()))


class _Slots(dict[str, int]):
    """Numbers of tenants that come and go: each gets a free one."""

    def __init__(self) -> None:
        super().__init__()
        self._free: list[int] = []

    def take(self, name: str) -> int:
        slot = self[name] = self._free.pop() if self._free else len(self)
        return slot

    def give_back(self, name: str) -> None:
        self._free.append(self.pop(name))


def _array(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(numbers, np.int64)
