"""Results of the choice of lengths on made-up machines, compared with the best fixed length.

The time of a step depends on its tokens and on the passes of the drafter, and some steps take much
longer for no reason. Completions are short, and some are easier to draft than others. A caller with
a completion asks again a step later.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
import pytest

from aioserve.scheduling.speculation.draft_lengths import FIRST_STEPS, DraftLengths, DraftRecord

LIMIT = 8
PROMPT_TOKENS, SPREAD = 28, 0.12
STEP, TOKEN, VERIFYING = 1.0, 0.03, 0.5
"""Seconds of a step, and the seconds added by each token and by verifying draft tokens."""


@dataclass(frozen=True)
class Machine:
    """A made-up machine. The drafter makes a pass of `pass_seconds` for each draft token, and one
    more for what it reads before."""

    streams: int
    acceptance: float
    pass_seconds: float
    _: KW_ONLY
    answer_tokens: int = 40

    def rate(self, seed: int, fixed: int | None = None, steps: int = 600) -> float:
        """Tokens a second, by the choice or with a fixed number of draft tokens."""
        source, lengths = np.random.default_rng(seed), DraftLengths()
        records = [DraftRecord(LIMIT) for _ in range(self.streams)]
        left, whole, acceptance = [0] * self.streams, [0] * self.streams, [0.0] * self.streams
        tokens, time, was_verified = 0, 0.0, False
        for step in range(steps):
            ready = [i for i in range(self.streams) if left[i] > 0]
            asks = [i for i in range(self.streams) if left[i] == 0]
            prefilled = PROMPT_TOKENS * len(asks)
            left = [min(0, one + 1) if one <= 0 else one for one in left]
            for i in asks:
                left[i] = whole[i] = int(source.geometric(1 / self.answer_tokens))
                acceptance[i] = min(0.99, max(0.01, source.normal(self.acceptance, SPREAD)))
                records[i] = DraftRecord(LIMIT, lengths.usual)
                tokens += 1
            chosen = [fixed or 0] * len(ready)
            if fixed is None:
                chosen = lengths.choose([records[i] for i in ready], 0, prefilled, 400)
            longest = max(chosen, default=0)
            drafting = self.pass_seconds * (longest + 1) if longest else 0.0
            rows = len(ready) + sum(chosen) + prefilled
            seconds = STEP + TOKEN * rows + (VERIFYING if longest else 0.0) + drafting
            time += seconds
            slow = source.uniform(2, 30) if step < 2 or source.random() < 0.02 else 1.0
            measured = slow * source.lognormal(0, 0.15)
            for i, count in zip(ready, chosen, strict=True):
                wrong = np.flatnonzero(source.random(count) >= acceptance[i])
                accepted = int(wrong[0]) if len(wrong) else count
                brought = min(accepted + 1, left[i])
                left[i] -= brought
                tokens += brought
                if records[i].steps < FIRST_STEPS:
                    lengths.usual.verified(count, count, brought - 1)
                records[i].verified(count, count, brought - 1)
                if left[i] == 0:
                    left[i] = -1
            lengths.record(
                rows,
                seconds * measured,
                # After draft tokens the start of the next step is unknown: it counts as verifying.
                verified=longest > 0 or was_verified,
                longest=longest,
                drafting=drafting * measured,
            )
            was_verified = longest > 0
        return tokens / time


MACHINES = [
    *[Machine(1, acceptance, seconds) for acceptance in (0.85, 0.3) for seconds in (0.02, 0.2, 1)],
    *[Machine(8, acceptance, seconds) for acceptance in (0.85, 0.6) for seconds in (0.02, 0.2)],
    *[Machine(8, acceptance, 0.2, answer_tokens=14) for acceptance in (0.85, 0.3)],
    Machine(32, 0.6, 0.2),
]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_what_is_chosen_is_seldom_far_from_the_best(machine: Machine) -> None:
    best = max(machine.rate(0, fixed) for fixed in (0, 2, 4, 8))
    found = [machine.rate(seed) for seed in range(3)]
    assert np.median(found) >= 0.88 * best
    assert np.median(found) >= 0.93 * machine.rate(0, 0)
