"""Cost tables are what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from aioserve.errors import ConfigError
from aioserve.simulation.cost import CostTable, StepLoad
from aioserve.simulation.cost_table_file import read_cost_table
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import PENDING_IDS, ItemKind, SampleRow, StepPlan, WorkItem


def step(
    *items: tuple[int, int], copies: tuple[PageCopy, ...] = (), samples: bool = True
) -> StepPlan:
    work = [
        WorkItem(
            kind=ItemKind.DECODE if count == 1 else ItemKind.PREFILL,
            sequence_id=1,
            slot=0,
            start=start,
            index=start,
            count=count,
            token_ids=PENDING_IDS,
            rows=(SampleRow(offset=count - 1, slot=0),) if samples else (),
        )
        for start, count in items
    ]
    return StepPlan(step=1, items=tuple(work), copies=copies)


TABLE = {
    "prefill_tokens": [0, 100, 300],
    "decode_batch": [0, 8],
    "seconds": [[0.0, 0.2], [1.0, 1.4], [2.0, 2.4]],
}


@pytest.mark.parametrize(
    ("items", "seconds"),
    [
        ([(0, 100)], 1.0),
        ([(0, 60), (20, 40)] + [(5, 1)] * 8, 1.4),
        ([(5, 1)] * 4, 0.1),
        ([(0, 50)], 0.5),
        ([(0, 50)] + [(5, 1)] * 4, (0.0 + 0.2 + 1.0 + 1.4) / 4),
        ([(0, 400)], 2.5),
        ([(0, 100)] + [(5, 1)] * 16, 1.8),
        ([(0, 400)] + [(5, 1)] * 16, 2.4 + 0.5 + 0.4),
    ],
)
def test_a_table_is_interpolated(items: list[tuple[int, int]], seconds: float) -> None:
    assert CostTable(**TABLE).step_seconds(step(*items)) == pytest.approx(seconds)


def test_a_chunk_of_one_token_that_samples_nothing_is_no_decode() -> None:
    assert CostTable(**TABLE).step_seconds(step(*[(5, 1)] * 50, samples=False)) == 0.5


def test_a_step_below_all_that_was_measured_takes_as_long_as_the_first() -> None:
    table = CostTable([100, 300], [1, 8], [[0.3, 0.4], [2.0, 2.1]])
    assert table.step_seconds(step((5, 1))) == 0.3


def test_context_is_added_to_the_grid() -> None:
    table = CostTable(**TABLE, seconds_per_context_token=1e-3, seconds_per_attended_pair=1e-5)
    plan = step((60, 40), (0, 60), (9, 1), (19, 1), *[(0, 1)] * 6)
    pairs = sum(range(61, 101)) + sum(range(1, 61))
    assert StepLoad.of(plan) == StepLoad(100, 8, 36, pairs)
    assert table.step_seconds(plan) == pytest.approx(1.4 + 0.036 + pairs * 1e-5)


def test_further_rows_of_a_token_cost_a_table_nothing() -> None:
    plan = step((9, 1))
    (work,) = plan.items
    twice = msgspec.structs.replace(work, rows=work.rows * 2)
    plan = msgspec.structs.replace(plan, items=(twice,))
    assert StepLoad.of(plan) == StepLoad(0, 1, 10, 0)


def test_a_table_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    assert read_cost_table(path).step_seconds(step((0, 100))) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill_tokens": [0, 100]}, "a grid of 2 by 2"),
        ({"prefill_tokens": [0, 300, 100]}, "prefill_tokens must be two or more growing counts"),
        ({"decode_batch": [4]}, "decode_batch must be two or more growing counts"),
        ({"seconds": [[0.0, 0.2], [1.0, 1.4], [2.0]]}, "a grid of 3 by 2"),
        ({"seconds": [[0.0, 0.2], [1.0, 0.4], [2.0, 2.4]]}, "must not shrink"),
        ({"seconds": [[-1.0, 0.2], [1.0, 1.4], [2.0, 2.4]]}, "more than 0"),
        ({"seconds": [[0.0, 0.0], [1.0, 1.4], [2.0, 2.4]]}, "more than 0"),
        ({"decode_batch": [1, 8]}, "more than 0"),
        ({"seconds": "fast"}, "seconds"),
        ({"seconds_per_context_token": -1e-9}, "seconds_per_context_token must be from 0 on"),
        ({"seconds_per_attended_pair": -1e-9}, "seconds_per_attended_pair must be from 0 on"),
        ({"seconds_per_token": 1e-9}, "unknown field `seconds_per_token`"),
        ({"version": 2}, "version"),
    ],
)
def test_a_table_that_is_none_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE | change))
    with pytest.raises(ConfigError, match=message) as raised:
        read_cost_table(path)
    assert str(path) in str(raised.value)
