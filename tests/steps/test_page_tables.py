"""The page tables of slots, from what plans say."""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.request import SamplingParams
from aioserve.steps.page_tables import SlotPageTables
from aioserve.steps.pages import SlotPages
from aioserve.steps.plan import SlotStart, StepPlan
from tests.scheduling.bench import Bench


def said(*pages: tuple[int, int, list[int]], ended: tuple[int, ...] = (), started=()) -> StepPlan:
    return StepPlan(
        step=1,
        items=(),
        ended_slots=ended,
        started_slots=tuple(SlotStart(slot=s, params=SamplingParams(), seed=0) for s in started),
        pages=tuple(SlotPages(slot, first, np.array(ids, np.int32)) for slot, first, ids in pages),
    )


def test_pages_are_appended_and_replaced_and_forgotten() -> None:
    tables = SlotPageTables(4)
    steps = [
        (said((3, 0, [10, 11]), started=[3]), [10, 11]),
        (said((3, 2, [14])), [10, 11, 14]),
        (said(), [10, 11, 14]),
        (said((3, 1, [9, 14])), [10, 9, 14]),
        (said((3, 1, [8])), [10, 8]),
        (said((3, 2, list(range(20, 60)))), [10, 8, *range(20, 60)]),
        (said((3, 0, [5]), ended=(3,), started=[3]), [5]),
        (said(ended=(3,)), []),
    ]
    for plan, pages in steps:
        tables.take(plan)
        assert tables.page_ids(3).tolist() == pages
        assert tables.page_ids(2).tolist() == []


def test_pages_that_leave_a_gap_or_are_of_no_slot_are_refused() -> None:
    tables = SlotPageTables(4)
    tables.take(said((3, 0, [10, 11])))
    with pytest.raises(InvariantError, match="slot 3 has 2 pages, and gets more from 3 on"):
        tables.take(said((3, 3, [12])))
    for slot in (-1, 4):
        with pytest.raises(InvariantError, match=f"slot {slot} gets pages, and there are 4"):
            tables.take(said((slot, 0, [12])))


def test_a_plan_carries_only_what_changes() -> None:
    bench = Bench(page_size=4, num_pages=16)
    bench.submit(9, max_tokens=8)
    carried = []
    while bench.sequences:
        plan = bench.plan()
        carried.append([(c.slot, c.first, len(c.page_ids)) for c in plan.pages])
        bench.commit(plan)
    assert carried == [[(0, 0, 3)], [], [], [], [(0, 3, 1)], [], [], []]


def test_what_no_runner_heard_of_is_carried_again() -> None:
    """Two requests are in the first step. One of them is in the next step too, before the first is
    known to fail."""
    bench = Bench(page_size=4, num_pages=16)
    bench.submit(5, max_tokens=8)
    lost = bench.plan()
    bench.scheduler.not_launched(lost)
    later = bench.submit(6, max_tokens=2)
    after = bench.plan()
    assert [change.slot for change in after.pages] == [0, 1]
    assert after.pages[0] is lost.pages[0]
    bench.scheduler.fail(lost, "planted")
    updates = bench.commit(after)
    assert [update.sequence_id for update in updates] == [later]
    assert len(bench.run()[later]) == 1


def test_pages_of_a_slot_that_ends_before_it_is_known_are_not_carried() -> None:
    bench = Bench(page_size=4, num_pages=16)
    bench.submit(5, max_tokens=8)
    lost = bench.plan()
    bench.scheduler.not_launched(lost)
    bench.scheduler.fail(lost, "planted")
    bench.submit(6, max_tokens=2)
    plan = bench.plan()
    assert [change.slot for change in plan.pages] == [plan.items[0].slot]


def test_each_position_brings_a_page_of_every_group() -> None:
    tables = SlotPageTables(4, num_groups=3)
    tables.take(said((1, 0, [10, 20, 30, 11, 21, 31]), (2, 0, [5, 6, 7]), started=[1, 2]))
    tables.take(said((1, 2, [12, 22, 32])))
    tables.take(said((1, 1, [41, 21, 31, 42, 22, 32])))
    assert [tables.page_ids(1, group).tolist() for group in range(3)] == [
        [10, 41, 42],
        [20, 21, 22],
        [30, 31, 32],
    ]
    rows = tables.rows(np.array([2, 1]), np.array([4, 12]), 4)
    assert rows[:, 1].tolist() == [[10, 41, 42], [20, 21, 22], [30, 31, 32]]
    assert rows[:, 0, 0].tolist() == [5, 6, 7]
    assert rows.flags.c_contiguous


def test_pages_that_are_not_one_of_each_group_are_refused() -> None:
    tables = SlotPageTables(4, num_groups=3)
    with pytest.raises(InvariantError, match="slot 1 gets 4 pages, which are none of 3 groups"):
        tables.take(said((1, 0, [1, 2, 3, 4]), started=[1]))
