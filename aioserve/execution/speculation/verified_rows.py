"""Which rows of logits count, where several were drawn from for one row of a plan.

plan's rows      0               1    2
draft tokens     7 9 4           -    5 5
drawn            7 9 1 8         3    2 6 0
kept             7 9 1           3    2

A row may have further draft tokens beside its own, which are drawn from as one more row each,
behind all others: its branches. It keeps what most is kept of, its own where that is as much.
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
    """Tokens in order, and what is to be said of them. While each row has one, an index of a token
    is that of its row."""

    token_ids: list[int]
    errors: dict[int, str]
    """What is wrong with logits, by index of a row, as `failures` and `token_counts` are."""
    failures: dict[int, str]
    late: Collection[int]
    """Rows whose mask came too late."""
    logprobs: dict[int, Logprobs]
    """What is told, by index of a token."""
    token_counts: dict[int, int] = field(default_factory=dict)
    """Tokens of rows that haven't one."""

    def is_bad(self, row: int) -> bool:
        """Whether what was drawn from a row is nothing."""
        return row in self.errors or row in self.failures or row in self.late

    def without_late(self) -> DrawnRows:
        """Rows whose mask came late have no token."""
        return _picked(
            self, [(() if row in self.late else (row,)) for row in range(len(self.token_ids))]
        )


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """The rows of a plan among those drawn from."""

    firsts: Sequence[int]
    """Index of the first of each, in rising order."""
    counts: Sequence[int]
    """Rows drawn from for each."""
    draft_tokens: Mapping[int, Sequence[int]]
    """Draft tokens behind it, of which each has a row more, by that index."""
    branch_of: tuple[int, ...] = ()
    """The last rows are branches: numbers of the rows that they are beside."""

    @classmethod
    def of(cls, plan: StepPlan, branch_of: tuple[int, ...] = ()) -> VerifiedRows:
        """Rows of a plan that is resolved (`aioserve.execution.speculation.resolver`)."""
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
        """`StepOutcome.drafted`."""
        numbers = {first: number for number, first in enumerate(self.firsts)}
        found = {numbers[first]: len(ids) for first, ids in self.draft_tokens.items()}
        for number, row in self._branches():
            found[row] = max(found.get(row, 0), found.pop(number))
        return found

    @property
    def branched(self) -> dict[int, int]:
        """`StepOutcome.branched`."""
        drafted = self.drafted
        found: dict[int, int] = {}
        for number, row in self._branches():
            beside = self.counts[row] - 1 - drafted[row]
            found[row] = found.get(row, beside) + self.counts[number]
        return found

    def _branches(self) -> Iterator[tuple[int, int]]:
        """Numbers of branches, and of the rows that they are beside."""
        return enumerate(self.branch_of, len(self.firsts) - len(self.branch_of))

    def kept(self, drawn: DrawnRows) -> DrawnRows:
        """Keep those that count: up to the first that is no draft token, or that is bad."""
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
    """Some of the rows that were drawn from, as tokens of the rows of a plan: each has its own."""
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
