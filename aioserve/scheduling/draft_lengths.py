"""How many guesses of each sequence a step verifies: as many as let it bring the most tokens a
second, by what steps have cost and how often guesses were right.

    sequences        chance that a guess counts     rows, the likeliest first
    A  right in 0.9  0.9  0.81 0.73 0.66 ..         A1 A2 A3 A4 B1 ..
    B  right in 0.5  0.5  0.25 0.13 ..              tokens so far / seconds of a step of so many

A step takes those rows up to which the quotient is largest. Beside many sequences, where a row
takes time of its own, or while hardly a guess is right, that is none at all. Then one is made now
and again, since nobody would know otherwise that it pays again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["DraftLengths", "DraftRecord", "StepCosts"]

DECAY = 0.95
"""What a guess still counts after each further one."""
FIRST_ACCEPTANCE, FIRST_WEIGHT = 0.8, 2.0
"""Until guesses were verified, so often are they taken to be right; and as many guesses is that
worth."""
PROBE_STEPS = 32
"""A sequence without guesses has one after so many steps."""
LEAST_GAIN = 1.02
"""Guesses that bring less than that are within what nobody can measure."""
COST_DECAY = 0.9
"""What the mean of earlier steps counts beside one more."""
MOST_OF_MEAN = 3.0
"""A step that took longer than that many times the mean is counted as if it had taken so long: the
machine did something else meanwhile."""


class DraftRecord:
    """How guesses for one sequence have fared."""

    __slots__ = ("_right", "_tried", "limit", "made", "steps_without")

    def __init__(self, limit: int) -> None:
        self.limit: int = limit
        """Most guesses of a step."""
        self.made: float = 1.0
        """Mean share of the guesses asked for that the drafter made."""
        self.steps_without: int = 0
        """Steps since it last had a guess to make."""
        self._right = FIRST_ACCEPTANCE * FIRST_WEIGHT
        self._tried = FIRST_WEIGHT

    @property
    def acceptance(self) -> float:
        """Chance that a guess is right if all before it are."""
        return self._right / self._tried

    def verified(self, asked: int, drafted: int, accepted: int) -> None:
        """The drafter made `drafted` of `asked` guesses, of which `accepted` were right."""
        if not asked:
            return
        self.made += (1 - DECAY) * (drafted / asked - self.made)
        tried = accepted + (accepted < drafted)
        kept = DECAY**tried
        self._right = kept * self._right + accepted
        self._tried = kept * self._tried + tried


class StepCosts:
    """Seconds of a step by the number of tokens that it computes, as the last steps had it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        """Means of tokens are kept beside those of seconds, by bucket, in rising order."""
        self._seconds: list[float] = []

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; what took no time tells nothing."""
        if seconds <= 0:
            return
        place = _bucket(num_tokens)
        at = int(np.searchsorted(self._tokens, place))
        if at == len(self._tokens) or self._tokens[at] != place:
            self._tokens.insert(at, place)
            self._seconds.insert(at, seconds)
            return
        mean = self._seconds[at]
        self._seconds[at] = mean + (1 - COST_DECAY) * (min(seconds, MOST_OF_MEAN * mean) - mean)

    def of(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds of steps of so many tokens, float64 `[n]`. No step costs less than a smaller one.
        Outside of what was measured only to try tells more, so that it is said to be cheap there:
        what is larger costs as much as the largest measured, and what is smaller as much less than
        the smallest as it has fewer tokens. 1 where nothing was measured."""
        if not self._tokens:
            return np.ones(len(num_tokens))
        rising = np.maximum.accumulate(self._seconds)
        return np.interp(num_tokens, [0, *self._tokens], [0.0, *rising])


def _bucket(num_tokens: int) -> int:
    """Few enough that each is met again: every number up to 16, and eight for each doubling."""
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return (num_tokens + step // 2) // step * step


class DraftLengths:
    """Chooses for the sequences of one step at a time."""

    def __init__(self) -> None:
        self.costs: StepCosts = StepCosts()

    def choose(
        self, records: Sequence[DraftRecord], num_others: int, num_prefilled: int, most: int
    ) -> list[int]:
        """The number of guesses for each of `records`, together at most `most`, beside `num_others`
        sequences that have none and `num_prefilled` tokens of prompts, which count as much as any
        other."""
        limits = np.array([record.limit for record in records])
        width = int(limits.max(initial=0))
        if not width or most <= 0:
            return [0] * len(records)
        others = len(records) + num_others + num_prefilled
        chances = np.array([record.acceptance for record in records])[:, None]
        made = np.array([max(record.made, 1 / PROBE_STEPS) for record in records])
        numbers = np.arange(1, width + 1)
        gains = np.where(numbers <= limits[:, None], chances**numbers, 0.0)
        order = np.argsort(-gains, axis=None, kind="stable")[:most]
        rows = order // width
        order, rows = order[gains.flat[order] > 0], rows[gains.flat[order] > 0]
        brought = np.cumsum(gains.flat[order] * made[rows])
        tokens = others + np.concatenate(([0.0], np.cumsum(made[rows])))
        rates = (others + np.concatenate(([0.0], brought))) / self.costs.of(tokens)
        best = int(rates.argmax())
        if rates[best] < LEAST_GAIN * rates[0]:
            best = 0
        lengths = np.bincount(rows[:best], minlength=len(records)).tolist()
        return [self._probed(*pair) for pair in zip(records, lengths, strict=True)]

    def _probed(self, record: DraftRecord, length: int) -> int:
        record.steps_without = 0 if length else record.steps_without + 1
        if record.steps_without < PROBE_STEPS or not record.limit:
            return length
        record.steps_without = 0
        return 1
