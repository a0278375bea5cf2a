"""How many draft tokens each sequence has in a step: as many as bring the most tokens a second, by
a moving average of how often they are accepted and a table of what steps have cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median_low

import numpy as np
import numpy.typing as npt

__all__ = ["FIRST_STEPS", "DraftLengths", "DraftRecord", "StepCosts"]

DECAY, FIRST_ACCEPTANCE, FIRST_WEIGHT = 0.95, 0.8, 1.5
"""Weight that is kept after each draft token; first expectation of acceptance, and its weight."""
FIRST_STEPS = 2
"""Steps of each sequence that tell what to expect of others: good ones would count for more."""
PROBE_STEPS, PROBE_LENGTH = 96, 3
"""After so many steps, at most four times as many, a few do the opposite: it may pay by now."""
HELD_STEPS, KEPT_STEPS, LEAST_GAIN = 4, 9, 1.05
"""Steps for which a choice stands, and none for twice as long; those that a median is of, since a
machine has other work; and the least gain that can be measured."""


class DraftRecord:
    """How draft tokens of one sequence have fared. `usual`: those of all sequences."""

    __slots__ = ("_right", "_tried", "limit", "made", "steps")

    def __init__(self, limit: int, usual: DraftRecord | None = None) -> None:
        self.limit: int = limit
        self.steps: int = 0
        self.made: float = 1.0 if usual is None else usual.made
        """Mean share of those asked for that the drafter made, branches included."""
        expected = FIRST_ACCEPTANCE if usual is None else usual.acceptance
        # A little more is hoped for, or one unlucky sequence would end it for all.
        self._right = (0.6 * expected + 0.4 * FIRST_ACCEPTANCE) * FIRST_WEIGHT
        self._tried = FIRST_WEIGHT

    @property
    def acceptance(self) -> float:
        """Chance that a draft token is accepted if all before it are."""
        return self._right / self._tried

    def verified(
        self, asked: int, drafted: int, accepted: int, branched: int = 0, *, dry_steps: int = 0
    ) -> None:
        """The drafter made `drafted` of `asked` tokens, of which `accepted` were right, and
        `branched` beside them. A dry run stands for all `dry_steps` since it was made."""
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
        """Sizes share an entry with those close by. One seen once counts while no other does."""
        self.are_known: bool = False

    def took(self, num_tokens: int, seconds: float) -> None:
        if seconds > 0:
            grain = 1 << max(0, num_tokens.bit_length() - 4)
            place = (num_tokens + grain // 2) // grain * grain
            last = self._last.setdefault(place, deque(maxlen=KEPT_STEPS))
            last.append(seconds)
            if len(last) > 1 or not self.medians:
                self.medians = {n: m for n, m in self.medians.items() if len(self._last[n]) > 1}
                self.medians[place], self.are_known = median_low(last), len(last) > 1

    def of(self, num_tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds of steps of so many tokens, float64 `[n]`: they never fall with the tokens, and
        are low beyond what was measured, so that it is tried. 1 where nothing was."""
        places = sorted(self.medians)
        medians = np.array([self.medians[place] for place in places] or [1.0])
        most, least = np.maximum.accumulate(medians), np.minimum.accumulate(medians[::-1])[::-1]
        return np.interp(np.asarray(num_tokens), [0, *(places or [1])], [0.0, *(most + least) / 2])


class DraftLengths:
    """Chooses for the sequences of one step at a time."""

    def __init__(self) -> None:
        self.plain: StepCosts = StepCosts()
        """Costs of steps without draft tokens."""
        self.verifying: StepCosts = StepCosts()
        """Costs of those with, but for their drafter."""
        self.usual: DraftRecord = DraftRecord(0)
        self._pass_seconds: deque[float] = deque([0.0], KEPT_STEPS)
        """Seconds of drafting passes: one for each draft token of a sequence, and one more."""
        self._since_probe, self._wait = 0, PROBE_STEPS
        self._held_steps, self._held_others, self._held_sum = 0, 0, 0
        self._held: dict[DraftRecord, int] = {}
        self._verified: bool | None = None

    def took(
        self, tokens: int, seconds: float, *, verified: bool, longest: int = 0, drafting: float = 0
    ) -> None:
        """A step of so many tokens took so long, `drafting` seconds of it for at most `longest`
        draft tokens of a sequence. It counts behind one of its kind, as their costs overlap."""
        costs = self.verifying if verified else self.plain
        if verified is self._verified or not costs.medians:
            costs.took(tokens, seconds - drafting)
        if drafting > 0:
            self._pass_seconds.append(drafting / (longest + 1))
        self._verified = verified

    def rest(self, num_tokens: int, newest: DraftRecord) -> bool:
        """True if draft tokens don't pay in this step, of so many tokens without them: the last
        choice was none, it was made for the newest sequence too, and it stands. The step counts as
        if it was chosen for."""
        stands = self._held_steps > 1 and self._held_others == num_tokens and newest in self._held
        if not stands or self._held_sum or self._since_probe >= self._wait:
            return False
        self._held_steps -= 1
        self._since_probe += 1
        return True

    def choose(
        self, records: Sequence[DraftRecord], num_others: int, num_prefilled: int, most: int
    ) -> list[int]:
        """The number of draft tokens for each of `records`, together at most `most`, beside
        `num_others` sequences without and `num_prefilled` tokens of prompts."""
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
        # A step with draft tokens costs no less than one without of as many tokens.
        costs = np.max([one.of(others + np.cumsum(made[rows])) for one in known], axis=0)
        rates = brought / (costs + drafting)
        alike = [one for one in known if min(one.medians, default=0) <= others]
        alone = min([one.of(others) for one in alike or known[-1:]])
        pays = rates.max() >= LEAST_GAIN * others / alone
        return np.bincount(rows[: (1 + rates.argmax()) * pays], minlength=len(records)).tolist()
