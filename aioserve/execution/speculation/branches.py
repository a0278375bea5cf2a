"""Further paths of draft tokens beside a sequence's chain: each is one more sequence of the batch.

    known           a b c d | e            pages P Q, of two tokens each; e is pending
    chain           e f g                  pages P Q R, as without branches
    branch          e h i                  pages P Q S, where S is the runner's own
    drawn           h i k                  the branch is right: S is copied to R

A path begins at the last known token, and each path computes all of its own tokens. Earlier pages
are the sequence's own, so kernels need no mask of ancestors. Later pages belong to the runner
during the step.

Knows plans and pages, but neither tensors nor devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.execution.step_arrays import NO_COPIES, UnresolvedStep
from aioserve.paging.pages import full_pages, pages_for, tokens_in_part
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import ItemKind, SampleRow, StepPlan, WorkItem

__all__ = ["BranchedStep", "ScratchPages", "scratch_pages"]

BRANCHED_SEQUENCES = 8
"""Sequences of a step whose branches all find scratch pages."""

Paths = Mapping[int, Sequence[Sequence[int]]]
"""Paths of draft tokens beside the chain, by slot."""


def scratch_pages(
    max_branches: int, max_tokens: int, max_num_seqs: int, page_size: int, num_groups: int
) -> int:
    """Return the number of extra pages, after those of requests, in which branches are computed."""
    # The branches of a sequence together have at most as many rows as its chain may have draft
    # tokens. Each branch begins and ends in the middle of a page.
    one = pages_for(max_tokens, page_size) + 2 * max_branches if max_branches else 0
    return one * num_groups * min(max_num_seqs, BRANCHED_SEQUENCES)


@dataclass(frozen=True, slots=True)
class _Branch:
    item: int
    """Index of its sequence's item."""
    row: int
    """Row of that item among the rows of the plan."""
    ids: list[int]
    """The pending token, and the branch's draft tokens."""
    page_table: npt.NDArray[np.int32]
    """Pages of the branch, int32 `[num_groups, n]`."""


class ScratchPages:
    """Pages `[first, end)` of a cache, which belong to the runner."""

    def __init__(self, first: int, end: int) -> None:
        self._first = first
        self._end = end

    def branched(self, plan: StepPlan, read: UnresolvedStep, paths: Paths) -> BranchedStep | None:
        """Add branches to a step with a resolved plan; None if no sequence gets one.

        A sequence gets none if it wants edited logits or log-probabilities, or if scratch pages run
        out.
        """
        if read.masks is not None:
            return None
        branches: list[_Branch] = []
        copies: list[tuple[int, int, int, int, int]] = []
        row, free, size = 0, self._first, read.page_size
        for index, item in enumerate(plan.items):
            number, row = row, row + len(item.rows)
            if item.kind is not ItemKind.VERIFY or _asks_for_more(read, number):
                continue
            table = read.page_table[:, index]
            for path in paths.get(item.slot, ()):
                first, last = (
                    full_pages(item.index, size),
                    pages_for(item.index + 1 + len(path), size),
                )
                wanted = len(table) * (last - first)
                if free + wanted > self._end:
                    continue
                own = table.copy()
                own[:, first:last] = np.arange(free, free + wanted).reshape(len(table), -1)
                free += wanted
                if before := tokens_in_part(item.index, size):
                    copies += [
                        (0, int(source), 0, int(target), before)
                        for source, target in zip(table[:, first], own[:, first], strict=True)
                    ]
                branches.append(_Branch(index, number, [int(item.token_ids[0]), *path], own))
        if not branches:
            return None
        read = replace(read, copies=np.concatenate((read.copies, _copies(copies))))
        return BranchedStep(plan, read, branches)


class BranchedStep:
    """A step with its branches after its items. Removes them again once tokens are drawn."""

    def __init__(self, plan: StepPlan, read: UnresolvedStep, branches: Sequence[_Branch]) -> None:
        self._plan = plan
        self._read = read
        self._branches = branches

    @property
    def plan(self) -> StepPlan:
        """Plan with an item for each branch, after all others."""
        items = self._plan.items
        return msgspec.structs.replace(
            self._plan, items=(*items, *[_item(items[b.item], b.ids) for b in self._branches])
        )

    @property
    def read(self) -> UnresolvedStep:
        """Step with a row for each branch."""
        read, rows = self._read, [branch.row for branch in self._branches]
        asks, samples = read.asks, read.samples
        none = [None] * len(rows)
        at = np.array([*range(len(samples)), *rows])
        samples = samples.picked(at, samples.positions[at])
        slots = samples.slots.copy()
        slots[len(slots) - len(rows) :] = read.spare_slot
        tables = [read.page_table, *[branch.page_table[:, None] for branch in self._branches]]
        return replace(
            read,
            page_table=np.concatenate(tables, axis=1),
            samples=replace(samples, slots=slots),
            asks=replace(
                asks,
                edits=[*asks.edits, *none] if asks.edits else (),
                tops=[*asks.tops, *none] if asks.tops else (),
            ),
            branch_of=tuple(rows),
        )

    def drawn(
        self, outcome: StepOutcome
    ) -> tuple[StepPlan, npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Choose between chains and branches.

        Returns the plan, in which a better branch has replaced its chain. Also the indices of the
        plan's tokens among those computed, int64 `[T]`. Also the copies from scratch pages to the
        sequences' pages, as `Backend.copy_pages` takes them.
        """
        items = [*self._plan.items]
        counts = [item.count for item in items] + [len(b.ids) for b in self._branches]
        firsts = [0, *accumulate(counts)]
        places = [range(first, first + n) for first, n in zip(firsts, counts, strict=False)]
        copies: list[tuple[int, int, int, int, int]] = []
        for index, branch, kept in self._right(outcome):
            item, page_table = items[branch.item], self._read.page_table[:, branch.item]
            items[branch.item] = _item(item, branch.ids)
            places[branch.item] = places[len(self._plan.items) + index]
            copies += _copies_back(item.index, kept, branch, page_table, self._read.page_size)
        plan = msgspec.structs.replace(self._plan, items=tuple(items))
        rows = np.concatenate([np.array(p, np.int64) for p in places[: len(items)]])
        return plan, rows, _copies(copies)

    def _right(self, outcome: StepOutcome) -> Iterator[tuple[int, _Branch, int]]:
        """Yield each branch that was accepted further than its chain and than earlier branches.

        With it come its index and the number of its accepted tokens, the pending one included.
        """
        counts = outcome.token_counts
        ends = [*accumulate([counts.get(row, 1) for row in range(self._plan.num_rows)])]
        done: set[int] = set()
        for index, branch in enumerate(self._branches):
            end, chain = ends[branch.row], self._plan.items[branch.item].token_ids[1:].tolist()
            kept = [*outcome.token_ids[end - counts.get(branch.row, 1) : end]][:-1]
            count = len(kept)
            if (
                branch.row not in done
                and chain[:count] != kept
                and branch.ids[1 : 1 + count] == kept
            ):
                done.add(branch.row)
                yield index, branch, 1 + count


def _item(item: WorkItem, ids: Sequence[int]) -> WorkItem:
    rows = (SampleRow(offset=0, slot=item.slot),)
    token_ids = np.array(ids, np.int32)
    return msgspec.structs.replace(item, count=len(ids), token_ids=token_ids, rows=rows)


def _asks_for_more(read: UnresolvedStep, row: int) -> bool:
    edits, tops = read.asks.edits, read.asks.tops
    return bool(edits and edits[row] is not None) or bool(tops and tops[row] is not None)


def _copies_back(
    index: int, count: int, branch: _Branch, page_table: npt.NDArray[np.int32], page_size: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Copies of `count` entries from an index on, and of earlier ones in the same page."""
    for place in range(full_pages(index, page_size), pages_for(index + count, page_size)):
        num_tokens = min(page_size, index + count - place * page_size)
        for own, page in zip(branch.page_table[:, place], page_table[:, place], strict=True):
            yield 0, int(own), 0, int(page), num_tokens


def _copies(rows: Sequence[tuple[int, int, int, int, int]]) -> npt.NDArray[np.int32]:
    return np.array(rows, np.int32).reshape(-1, 5) if rows else NO_COPIES
