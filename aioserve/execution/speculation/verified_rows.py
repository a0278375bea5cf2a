"""Maps drawn rows of logits to rows of a plan, where one of these may have several.

plan's rows      0               1    2
draft tokens     7 9 4           -    5 5
drawn            7 9 1 8         3    2 6 0
kept             7 9 1           3    2

A row of a plan may have branches: further draft tokens, drawn from as additional rows after all
others. It keeps the path with the most accepted tokens, its own in case of a tie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from aioserve.request import Logprobs
from aioserve.steps.plan import StepPlan

__all__ = ["DrawnRows", "VerifiedRows"]


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Drawn tokens in order, with errors and log-probabilities. With one token a row, their
    indices are the same."""

    token_ids: list[int]
    errors: dict[int, str]
    """Errors in logits, by row index. `failures` and `token_counts` are also by row."""
    failures: dict[int, str]
    late: Collection[int]
    """Rows whose mask came too late."""
    logprobs: dict[int, Logprobs]
    """Log-probabilities to report, by token index."""
    token_counts: dict[int, int] = field(default_factory=dict)
    """Tokens of rows that haven't exactly one."""

    def is_bad(self, row: int) -> bool:
        """True if what was drawn from a row is invalid."""
        return row in self.errors or row in self.failures or row in self.late

    def without_late(self) -> DrawnRows:
        """Drop the tokens of rows whose mask came late."""
        return _picked(
            self, [(() if row in self.late else (row,)) for row in range(len(self.token_ids))]
        )


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """Rows of a plan among the rows drawn from."""

    firsts: Sequence[int]
    """First drawn row of each row of the plan, in rising order."""
    counts: Sequence[int]
    """Number of drawn rows of each."""
    draft_tokens: Mapping[int, Sequence[int]]
    """Draft tokens after each, by first row. Each has a further row."""
    branch_of: tuple[int, ...] = ()
    """Row that each of the last rows is a branch of."""

    @classmethod
    def of(cls, plan: StepPlan, branch_of: tuple[int, ...] = ()) -> VerifiedRows:
        """Make the rows of a resolved plan (`aioserve.execution.speculation.resolver`)."""
        rows = [(item, row) for item in plan.items for row in item.rows]
        counts = [item.most_tokens(row) for item, row in rows]
        firsts = [0, *accumulate(counts)][: len(rows)]
        draft_tokens = {
            first: item.token_ids[row.offset + 1 :].tolist()
            for first, count, (item, row) in zip(firsts, counts, rows, strict=True)
            if count > 1
        }
        return cls(firsts, counts, draft_tokens, branch_of)

    @property
    def drafted(self) -> dict[int, int]:
        """Value of `StepOutcome.drafted`."""
        numbers = {first: number for number, first in enumerate(self.firsts)}
        found = {numbers[first]: len(ids) for first, ids in self.draft_tokens.items()}
        for number, row in self._branches():
            found[row] = max(found.get(row, 0), found.pop(number))
        return found

    @property
    def branched(self) -> dict[int, int]:
        """Value of `StepOutcome.branched`."""
        drafted = self.drafted
        found: dict[int, int] = {}
        for number, row in self._branches():
            beside = self.counts[row] - 1 - drafted[row]
            found[row] = found.get(row, beside) + self.counts[number]
        return found

    def _branches(self) -> Iterator[tuple[int, int]]:
        """Yield each branch and the row that it belongs to, by index."""
        return enumerate(self.branch_of, len(self.firsts) - len(self.branch_of))

    def kept(self, drawn: DrawnRows) -> DrawnRows:
        """Keep accepted tokens: up to the first that differs from its draft token, or is
        invalid."""
        kept = [self._kept(first, drawn) for first in self.firsts]
        for number, row in self._branches():
            kept[row] = max(kept[row], kept[number], key=len)
        return _picked(drawn, kept[: len(kept) - len(self.branch_of)])

    def _kept(self, first: int, drawn: DrawnRows) -> Sequence[int]:
        if first in drawn.late:
            return ()
        rows = [first]
        for draft_token in self.draft_tokens.get(first, ()):
            row = rows[-1]
            behind = row + 1
            if drawn.token_ids[row] != draft_token or drawn.is_bad(row) or drawn.is_bad(behind):
                break
            rows.append(behind)
        return rows


def _picked(drawn: DrawnRows, rows: Sequence[Sequence[int]]) -> DrawnRows:
    """Reduce drawn rows to rows of a plan; `rows` has the drawn rows of each."""
    token_ids: list[int] = []
    token_counts: dict[int, int] = {}
    logprobs: dict[int, Logprobs] = {}
    for number, own in enumerate(rows):
        if len(own) != 1:
            token_counts[number] = len(own)
        for row in own:
            if row in drawn.logprobs:
                logprobs[len(token_ids)] = drawn.logprobs[row]
            token_ids.append(drawn.token_ids[row])
    numbers = {own[0]: number for number, own in enumerate(rows) if own}

    def of_plan(said: Mapping[int, str]) -> dict[int, str]:
        return {numbers[row]: why for row, why in said.items() if row in numbers}

    errors, failures = of_plan(drawn.errors), of_plan(drawn.failures)
    return DrawnRows(token_ids, errors, failures, (), logprobs, token_counts)
