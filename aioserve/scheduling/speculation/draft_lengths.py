"""How many guesses of each sequence a step verifies: as many as let it bring the most tokens a
second, by what steps have cost and how often guesses were right.

    sequences        chance that a guess counts     rows, the likeliest first
    A  right in 0.9  0.9  0.81 0.73 0.66 ..         A1 A2 A3 A4 B1 ..
    B  right in 0.5  0.5  0.25 0.13 ..              tokens so far / seconds of a step of so many

A step takes those rows up to which the quotient is largest, if that is larger than without a guess.
Beside many sequences, where a row takes time of its own, or while hardly a guess is right or made,
it isn't. Then one is asked for now and again, since nobody would know otherwise that it pays again.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "FIRST_STEPS",
    "STEPS_BEFORE",
    "AnswerLengths",
    "DraftLengths",
    "DraftRecord",
    "DraftingCosts",
    "StepCosts",
]

DECAY = 0.95
"""What a guess still counts after each further one."""
FIRST_ACCEPTANCE = 0.8
"""The first guesses of an engine are taken to be right so often."""
FIRST_STEPS = 2
"""Steps of each sequence that tell what to expect of one that begins: later ones verify the more
the better its guesses have fared, so that good ones would count for more."""
FIRST_WEIGHT = 2.0
"""What is known of others counts as so many guesses, and steps, of a sequence that begins."""
PROBE_STEPS = 96
"""After so many steps sequences without guesses have one, all in the same steps; and where there
always are guesses, there are none for a while."""
MOST_PROBE_STEPS = 4 * PROBE_STEPS
"""Each time that it didn't pay twice as many steps pass until the next, up to so many."""
PROBE_LENGTH = 3
"""Number of those steps in a row, as steps overlap with those of their kind alone."""
LEAST_TRIED = 0.25
"""Right guesses a step below which it isn't asked again what a step costs that verifies."""
KEPT_STEPS, KEPT_STEPS_WITHOUT = 4, 16
"""Steps for which a choice stands, and one for none at all, ..."""
ALIKE = 1.3
"""... while there is about as much to compute, by this factor."""
ANSWERS_TOKENS = 1000
"""An answer counts for as long as the next ones have about so many tokens: many that are short say
little about those that go on beside them."""
STEPS_BEFORE = 2.0
"""Steps of a request before its first token: one that it waits for, and that of its prompt."""
LEAST_GAIN = 1.05
"""Guesses that are to bring less than that are within what nobody can measure."""
DRAFTING_STEPS = 36
"""Number of last steps that tell what a drafter takes."""
COST_STEPS = 9
"""Number of last steps that tell what one costs."""


class DraftRecord:
    """How guesses for one sequence have fared."""

    __slots__ = ("_asked", "_right", "_tried", "is_watched", "limit", "made", "steps")

    def __init__(self, limit: int, usual: DraftRecord | None = None) -> None:
        """`usual`: what to expect, as guesses for others have fared."""
        self.limit: int = limit
        """Most guesses of a step."""
        self.steps: int = 0
        """Steps that verified any."""
        self.made: float = 1.0 if usual is None else usual.made
        """Mean share of the guesses asked for that the drafter made, branches included."""
        self.is_watched: bool = usual is not None and usual.is_watched
        """Whether how guesses fare is heard of while none is verified."""
        acceptance = FIRST_ACCEPTANCE if usual is None else usual.acceptance
        self._right = acceptance * FIRST_WEIGHT
        self._asked = self._tried = FIRST_WEIGHT

    @property
    def acceptance(self) -> float:
        """Chance that a guess is right if all before it are."""
        return self._right / self._tried

    @property
    def share(self) -> float:
        """`made`, but that where only asking tells, one that made none for long may make some."""
        return self.made if self.is_watched else max(self.made, 1 / PROBE_STEPS)

    @property
    def most_gain(self) -> float:
        """Right guesses that a step may bring on average, however many it verifies."""
        return self.share * min(self.limit, self.acceptance / max(1e-9, 1 - self.acceptance))

    @property
    def is_worth_a_try(self) -> bool:
        """Whether only a step that verifies can tell more: how often guesses are right, or, where
        that is known and often enough, what such steps cost."""
        return not self.is_watched or self.most_gain >= LEAST_TRIED

    def verified(self, asked: int, drafted: int, accepted: int, branched: int = 0) -> None:
        """The drafter made `drafted` of `asked` guesses, of which `accepted` were right; `branched`
        tokens were computed beside them."""
        if asked:
            self.steps += 1
            self._note((drafted + branched) / asked, 1, drafted, accepted)

    def dry_run(self, steps: int, asked: int, drafted: int, accepted: int) -> None:
        """As `verified`, of guesses that no step verified: they stand for all `steps` since they
        were made."""
        self.is_watched = True
        if steps and asked:
            self._note(drafted / asked, steps, drafted, accepted)

    def _note(self, share: float, steps: int, drafted: int, accepted: int) -> None:
        kept = DECAY**steps
        added = (1 - kept) / (1 - DECAY)
        self._asked = kept * self._asked + added
        self.made += added / self._asked * (share - self.made)
        tried = accepted + (accepted < drafted)
        kept = DECAY**tried
        self._right = kept * self._right + accepted
        self._tried = kept * self._tried + tried


class StepCosts:
    """Seconds of a step by the number of tokens that it computes: the median of the last steps of
    about so many, since now and again the machine does something else meanwhile."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        """Buckets in rising order; what is known of each is kept beside it."""
        self._last: list[deque[float]] = []
        """Seconds of the last steps."""
        self._medians: list[float | None] = []
        """None: nobody has asked since the last one."""

    @property
    def are_known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._tokens)

    def has_measured_below(self, num_tokens: int) -> bool:
        """Whether steps of so many tokens or fewer were measured twice: what a smaller one than any
        costs is a guess."""
        end = bisect.bisect_right(self._tokens, num_tokens)
        return any(len(last) > 1 for last in self._last[:end])

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; what took no time tells nothing."""
        if seconds <= 0:
            return
        place = _bucket(num_tokens)
        at = bisect.bisect_left(self._tokens, place)
        if at == len(self._tokens) or self._tokens[at] != place:
            self._tokens.insert(at, place)
            self._last.insert(at, deque([seconds], COST_STEPS))
            self._medians.insert(at, seconds)
            return
        self._last[at].append(seconds)
        self._medians[at] = None

    def _median(self, at: int) -> float:
        median = self._medians[at]
        if median is None:
            median = self._medians[at] = median_low(self._last[at])
        return median

    def of(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds of steps of so many tokens, float64 `[n]`. No step costs more than a larger one:
        where it was measured so, both cost the mean of what they took, by isotonic regression
        (Barlow et al., "Statistical inference under order restrictions", 1972). Outside of what was
        measured only to try tells more, so that it is said to be cheap there: what is larger costs
        as much as the largest measured, and what is smaller as much less than the smallest as it
        has fewer tokens. 1 where nothing was measured.
        """
        if not self._tokens:
            return np.ones(len(num_tokens))
        # What happened once may never come again, and has no median.
        counted = [at for at, last in enumerate(self._last) if len(last) > 1]
        counted = counted or range(len(self._tokens))
        tokens = [self._tokens[at] for at in counted]
        medians = [(self._median(at), len(self._last[at])) for at in counted]
        return np.interp(num_tokens, [0, *tokens], [0.0, *_never_falling(medians)])


def _never_falling(weighted: Iterable[tuple[float, int]]) -> list[float]:
    """The values that never fall and differ least from those given, by the squares of what they
    differ and so many times as the weight beside each says: neighbours that fall are one, of their
    mean."""
    pooled: list[tuple[float, int, int]] = []
    """Values, their weights, and how many values each stands for."""
    for value, weight in weighted:
        count = 1
        while pooled and pooled[-1][0] > value:
            before, more, others = pooled.pop()
            value = (before * more + value * weight) / (more + weight)
            weight, count = weight + more, count + others
        pooled.append((value, weight, count))
    return [value for value, _, count in pooled for _ in range(count)]


class DraftingCosts:
    """Seconds that the drafter takes in a step, by the most guesses of a sequence in it: it makes
    them one after the other, those of all sequences at once. A line, by least squares, through the
    medians of the last steps of each number. Where it was asked for one number alone, reading what
    it missed is taken to cost as much as a guess."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=DRAFTING_STEPS)
        """Passes and seconds of the last steps: one pass for each guess, and one more."""

    def took(self, longest: int, seconds: float) -> None:
        """It took so long for so many guesses; what took no time tells nothing."""
        if seconds > 0:
            self._last.append((longest + 1, seconds))

    def of(self, longest: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        """Seconds for so many guesses, float64 `[n]`. 0 where nothing was measured."""
        mean_passes, mean, slope = self._line()
        return np.maximum(0.0, mean + slope * (longest + 1 - mean_passes))

    def _line(self) -> tuple[float, float, float]:
        """A point of it, and its slope."""
        seconds: dict[int, list[float]] = {}
        for passes, taken in self._last:
            seconds.setdefault(passes, []).append(taken)
        # What happened once may never come again, and has no median.
        counted = {passes: some for passes, some in seconds.items() if len(some) > 1} or seconds
        if not counted:
            return 0.0, 0.0, 0.0
        medians = [(passes, len(some), median_low(some)) for passes, some in counted.items()]
        weight = sum([count for _, count, _ in medians])
        mean_passes = sum([count * passes for passes, count, _ in medians]) / weight
        mean = sum([count * taken for _, count, taken in medians]) / weight
        slope = most = mean / mean_passes
        if len(medians) > 1:
            spread = sum([n * (passes - mean_passes) ** 2 for passes, n, _ in medians])
            shared = sum([n * (passes - mean_passes) * (s - mean) for passes, n, s in medians])
            slope = max(0.0, min(shared / spread, most))
        return mean_passes, mean, slope


def _bucket(num_tokens: int) -> int:
    """Few enough that each is met again: every number up to 16, and eight for each doubling."""
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return (num_tokens + step // 2) // step * step


class AnswerLengths:
    """How many tokens the last answers had, and so how much of a request is its answer."""

    def __init__(self) -> None:
        self._ends = self._tokens = 0.0

    def ended(self, num_tokens: int) -> None:
        """An answer has ended that had so many tokens, at least 1."""
        kept = math.exp(-num_tokens / ANSWERS_TOKENS)
        self._ends = kept * self._ends + 1
        self._tokens = kept * self._tokens + num_tokens

    def progress(
        self, tokens_a_step: npt.NDArray[np.float64], streams: int
    ) -> npt.NDArray[np.float64]:
        """Tokens of an answer by the steps of its request, if each step brings so many once the
        first is there, float64 `[n]`. The steps before that are no fewer for guesses, and those of
        the other `streams` make them longer:

            14 tokens   1 a step: 2 + 14 steps, 0.9     4 a step: 2 + 3.5 steps, 2.5
        """
        if not self._ends:
            return tokens_a_step
        before = STEPS_BEFORE * (1 - 1 / streams) * self._ends / self._tokens
        return tokens_a_step / (1 + before * tokens_a_step)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A choice that stands for a while."""

    lengths: dict[DraftRecord, int]
    """None: no sequence has guesses."""
    usual: int
    """For sequences that came since."""
    ends: int
    """In the step of this number."""
    others_least: float
    others_most: float
    """Tokens beside the guesses of a step for which it stands. None may stand for more of them."""

    @classmethod
    def of(
        cls, records: Sequence[DraftRecord], lengths: Sequence[int], others: int, step: int
    ) -> _Kept:
        if not any(lengths):
            return cls({}, 0, step + KEPT_STEPS_WITHOUT, others / ALIKE, others)
        usual = round(sum(lengths) / len(lengths))
        kept = dict(zip(records, lengths, strict=True))
        return cls(kept, usual, step + KEPT_STEPS, others / ALIKE, others * ALIKE)


class DraftLengths:
    """Chooses for the sequences of one step at a time.

    What a step costs that verifies is known apart, since the next step can't begin before its
    drafter is asked, and so is what that takes. But for the first, only steps behind one of their
    kind count, since only these tell how steps of the kind overlap.
    """

    def __init__(self) -> None:
        self.plain: StepCosts = StepCosts()
        """Costs of steps in which the drafter isn't asked."""
        self.verifying: StepCosts = StepCosts()
        """Costs of those in which it is, but for the time that it took."""
        self.drafting: DraftingCosts = DraftingCosts()
        self.usual: DraftRecord = DraftRecord(0)
        """How guesses for all sequences have fared."""
        self.answers: AnswerLengths = AnswerLengths()
        self._steps = self._since_probe = 0
        self._wait = PROBE_STEPS
        self._last_verified: bool | None = None
        self._kept: _Kept | None = None

    def took(
        self,
        num_tokens: int,
        seconds: float,
        *,
        verified: bool,
        longest: int = 0,
        drafting_seconds: float = 0.0,
    ) -> None:
        """A step of so many tokens took so long; whether it verified guesses, of which a sequence
        had at most `longest`, and what their drafter took of the time."""
        costs = self.verifying if verified else self.plain
        if verified is self._last_verified or not costs.are_known:
            costs.took(num_tokens, seconds - drafting_seconds)
        self.drafting.took(longest, drafting_seconds)
        self._last_verified = verified

    def rests(self, num_tokens: int) -> bool:
        """Whether it is known without a look that the next step, of so many tokens, has no guesses:
        it is counted, and there is nothing to choose."""
        kept = self._kept
        if kept is None or kept.lengths or self._steps >= kept.ends:
            return False
        if num_tokens < kept.others_least or self._since_probe >= self._wait:
            return False
        self._steps += 1
        self._since_probe += 1
        return True

    def choose(
        self, records: Sequence[DraftRecord], num_others: int, num_prefilled: int, most: int
    ) -> list[int]:
        """The number of guesses for each of `records`, together at most `most`, beside `num_others`
        sequences that have none and `num_prefilled` tokens of prompts, which count as much as any
        other."""
        nothing = [0] * len(records)
        if most <= 0:
            return nothing
        others = len(records) + num_others + num_prefilled
        lengths = self._kept_or_best(records, others, len(records) + num_others, most)
        self._steps += 1
        self._since_probe += 1
        pays = any(lengths)
        if pays:
            self._wait = PROBE_STEPS
        if self._since_probe <= self._wait:
            return lengths
        if self._since_probe >= self._wait + PROBE_LENGTH:
            self._since_probe = 0
            self._wait = PROBE_STEPS if pays else min(2 * self._wait, MOST_PROBE_STEPS)
        if pays:
            return nothing
        able = [min(record.limit, 1) if record.is_worth_a_try else 0 for record in records]
        return able if sum(able) <= most else nothing

    def _kept_or_best(
        self, records: Sequence[DraftRecord], others: int, num_sequences: int, most: int
    ) -> list[int]:
        """What was best a few steps before, if about as much is to be computed: to look again takes
        as long as all else that is planned for some sequences."""
        kept = self._kept
        if kept is not None and self._steps < kept.ends and kept.others_least <= others:
            if not kept.lengths:
                return [0] * len(records)
            if others <= kept.others_most:
                lengths = [min(kept.lengths.get(r, kept.usual), r.limit) for r in records]
                if sum(lengths) <= most:
                    return lengths
        lengths = self._best(records, others, num_sequences, most)
        self._kept = None
        if self.plain.has_measured_below(others) and self.verifying.are_known:
            self._kept = _Kept.of(records, lengths, others, self._steps)
        return lengths

    def _best(
        self, records: Sequence[DraftRecord], others: int, num_sequences: int, most: int
    ) -> list[int]:
        if sum([record.most_gain for record in records]) < (LEAST_GAIN - 1) * others:
            return [0] * len(records)
        limits = np.array([record.limit for record in records])
        numbers = np.arange(1, int(limits.max(initial=0)) + 1)
        if not len(numbers):
            return [0] * len(records)
        chances = np.array([record.acceptance for record in records])[:, None]
        made = np.array([record.share for record in records])
        gains = np.where(numbers <= limits[:, None], chances**numbers, 0.0)
        order = np.argsort(-gains, axis=None, kind="stable")[:most]
        order = order[gains.flat[order] > 0]
        rows = order // len(numbers)
        brought = np.cumsum(gains.flat[order] * made[rows])
        tokens = others + np.cumsum(made[rows])
        if not len(rows):
            return [0] * len(records)
        longest = np.maximum.accumulate(numbers[order % len(numbers)])
        seconds = self._cost(self.verifying, self.plain, tokens) + self.drafting.of(longest)
        of_each = 1 + np.concatenate(([0.0], brought)) / others
        progress = self.answers.progress(of_each, num_sequences)
        rates = progress[1:] / seconds
        best = int(rates.argmax())
        if rates[best] < LEAST_GAIN * progress[0] / self._seconds_without(others):
            return [0] * len(records)
        return np.bincount(rows[: best + 1], minlength=len(records)).tolist()

    def _seconds_without(self, others: int) -> float:
        """Seconds of a step that verifies nothing. It takes no longer than one that does, with the
        time of the drafter for a guess; where none so small was measured, without that time."""
        num_tokens = np.array([float(others)])
        plain = float(self._cost(self.plain, self.verifying, num_tokens)[0])
        verifying = float(self._cost(self.verifying, self.plain, num_tokens)[0])
        if not self.plain.has_measured_below(others):
            return min(plain, verifying)
        if not self.verifying.has_measured_below(others):
            return plain
        return min(plain, verifying + float(self.drafting.of(np.array([1]))[0]))

    @staticmethod
    def _cost(
        costs: StepCosts, similar: StepCosts, num_tokens: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Seconds of steps; where none of the kind was measured, those of similar ones."""
        return (costs if costs.are_known else similar).of(num_tokens)
