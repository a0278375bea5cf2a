"""Choice of the number of draft tokens for each sequence in a step.

The choice maximizes tokens per second. It uses a moving average of acceptance, and a table of the
costs of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np
import numpy.typing as npt

__all__ = ["FIRST_STEPS", "DraftLengths", "DraftRecord", "StepCosts"]

DECAY, FIRST_ACCEPTANCE, FIRST_WEIGHT = 0.95, 0.8, 1.5
"""Weight kept after each draft token; first expectation of acceptance, and its weight."""
FIRST_STEPS = 2
"""First steps of each sequence, which set the expectation for others. Later steps don't count:
sequences with good drafts would weigh more."""
PROBE_STEPS, PROBE_LENGTH = 96, 3
"""Steps after which a few do the opposite of the choice, and how many: it may pay by now. The first
number grows up to fourfold."""
HELD_STEPS, KEPT_STEPS, LEAST_GAIN = 4, 9, 1.05
"""Steps for which a choice stands, twice as many for a choice of no draft tokens. Samples of a
median, which hides other work of the machine. Least gain that can be measured."""


class DraftRecord:
    """Record of how draft tokens of one sequence fared. `usual` is the record of all sequences."""

    __slots__ = ("_right", "_tried", "limit", "made", "steps")

    def __init__(self, limit: int, usual: DraftRecord | None = None) -> None:
        self.limit: int = limit
        self.steps: int = 0
        self.made: float = 1.0 if usual is None else usual.made
        """Mean share of the requested draft tokens that the drafter made, branches included."""
        expected = FIRST_ACCEPTANCE if usual is None else usual.acceptance
        # Expect a little more, or one unlucky sequence would end drafting for all.
        self._right = (0.6 * expected + 0.4 * FIRST_ACCEPTANCE) * FIRST_WEIGHT
        self._tried = FIRST_WEIGHT

    @property
    def acceptance(self) -> float:
        """Chance that a draft token is accepted if all before it are."""
        return self._right / self._tried

    def verified(
        self, asked: int, drafted: int, accepted: int, branched: int = 0, *, dry_steps: int = 0
    ) -> None:
        """Record a verification: the drafter made `drafted` of `asked` tokens, of which `accepted`
        were right, and `branched` beside them. A dry run stands for all `dry_steps` since it was
        made."""
        if asked:
            self.steps += not dry_steps
            share = (drafted + branched) / asked
            self.made += (1 - DECAY ** (dry_steps or 1)) * (share - self.made)
            tried = accepted + (accepted < drafted)
            self._right = DECAY**tried * self._right + accepted
            self._tried = DECAY**tried * self._tried + tried


class StepCosts:
    """Seconds of steps by the number of tokens that they compute."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self.medians: dict[int, float] = {}
        """Median seconds by number of tokens, with close sizes in one entry. A size seen once
        counts only while no other does."""
        self.are_known: bool = False

    def record(self, num_tokens: int, seconds: float) -> None:
        if seconds > 0:
            grain = 1 << max(0, num_tokens.bit_length() - 4)
            place = (num_tokens + grain // 2) // grain * grain
            last = self._last.setdefault(place, deque(maxlen=KEPT_STEPS))
            last.append(seconds)
            if len(last) > 1 or not self.medians:
                self.medians = {n: m for n, m in self.medians.items() if len(self._last[n]) > 1}
                self.medians[place], self.are_known = median_low(last), len(last) > 1

    def of(self, num_tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds of steps of `num_tokens` tokens, float64 `[n]`; 1 if nothing was measured.

        They never fall as tokens grow. Beyond the measured sizes they are low, so that larger steps
        are tried.
        """
        places = sorted(self.medians)
        medians = np.array([self.medians[place] for place in places] or [1.0])
        most, least = np.maximum.accumulate(medians), np.minimum.accumulate(medians[::-1])[::-1]
        return np.interp(np.asarray(num_tokens), [0, *(places or [1])], [0.0, *(most + least) / 2])


class DraftLengths:
    """Chooses the numbers of draft tokens, for the sequences of one step at a time."""

    def __init__(self) -> None:
        self.plain: StepCosts = StepCosts()
        """Costs of steps without draft tokens."""
        self.verifying: StepCosts = StepCosts()
        """Costs of steps with draft tokens, without the time of their drafter."""
        self.usual: DraftRecord = DraftRecord(0)
        self._pass_seconds: deque[float] = deque([0.0], KEPT_STEPS)
        """Seconds of one drafting pass. A step makes one pass for each draft token of a sequence,
        and one more."""
        self._since_probe, self._wait = 0, PROBE_STEPS
        self._held_steps, self._held_others, self._held_sum = 0, 0, 0
        self._held: dict[DraftRecord, int] = {}
        self._verified: bool | None = None

    def record(
        self, tokens: int, seconds: float, *, verified: bool, longest: int = 0, drafting: float = 0
    ) -> None:
        """Record a step of `tokens` tokens that took `seconds`. The drafter took `drafting` of
        these, for at most `longest` draft tokens of a sequence. A step counts only after one of its
        kind, since their costs overlap."""
        costs = self.verifying if verified else self.plain
        if verified is self._verified or not costs.medians:
            costs.record(tokens, seconds - drafting)
        if drafting > 0:
            self._pass_seconds.append(drafting / (longest + 1))
        self._verified = verified

    def rest(self, num_tokens: int, newest: DraftRecord) -> bool:
        """True if draft tokens don't pay in this step, which has `num_tokens` tokens without them.
        The last choice was none, it included the newest sequence, and it still stands. Counts the
        step as chosen for."""
        stands = self._held_steps > 1 and self._held_others == num_tokens and newest in self._held
        if not stands or self._held_sum or self._since_probe >= self._wait:
            return False
        self._held_steps -= 1
        self._since_probe += 1
        return True

    def choose(
        self, records: Sequence[DraftRecord], num_others: int, num_prefilled: int, most: int
    ) -> list[int]:
        """Choose the number of draft tokens for each of `records`, together at most `most`. The
        step also has `num_others` sequences without any and `num_prefilled` tokens of prompts."""
        others, nothing = len(records) + num_others + num_prefilled, [0] * len(records)
        if most <= 0 or not any(record.limit for record in records):
            return nothing
        lengths = [self._held.get(record, most + 1) for record in records]
        self._held_steps -= 1
        if self._held_steps <= 0 or others != self._held_others or sum(lengths) > most:
            lengths = self._best(records, others, most)
            self._held, self._held_others = dict(zip(records, lengths, strict=True)), others
            self._held_sum = sum(lengths)
            is_known = self.plain.are_known and self.verifying.are_known
            self._held_steps = is_known * HELD_STEPS * (1 if self._held_sum else 2)
        self._since_probe += 1
        if self._since_probe <= self._wait:
            return lengths
        pays = any(lengths)
        if self._since_probe >= self._wait + PROBE_LENGTH:
            self._since_probe = 0
            self._wait = PROBE_STEPS if pays else min(2 * self._wait, 4 * PROBE_STEPS)
        able = [min(record.limit, 1) for record in records]
        return able if not pays and sum(able) <= most else nothing

    def _best(self, records: Sequence[DraftRecord], others: int, most: int) -> list[int]:
        numbers = np.arange(1, max([record.limit for record in records]) + 1)
        limits, made, chances = np.array([(r.limit, r.made, r.acceptance) for r in records]).T
        gains = np.where(numbers <= limits[:, None], chances[:, None] ** numbers, 0.0)
        order = np.argsort(-gains, axis=None, kind="stable")[:most]
        rows, places = np.divmod(order, len(numbers))
        brought = others + np.cumsum(gains[rows, places] * made[rows])
        drafting = median_low(self._pass_seconds) * (2 + np.maximum.accumulate(places))
        known = [costs for costs in (self.verifying, self.plain) if costs.medians] or [self.plain]
        # A step with draft tokens costs no less than one without, of the same size.
        costs = np.max([one.of(others + np.cumsum(made[rows])) for one in known], axis=0)
        rates = brought / (costs + drafting)
        alike = [one for one in known if min(one.medians, default=0) <= others]
        alone = min([one.of(others) for one in alike or known[-1:]])
        pays = rates.max() >= LEAST_GAIN * others / alone
        return np.bincount(rows[: (1 + rates.argmax()) * pays], minlength=len(records)).tolist()
