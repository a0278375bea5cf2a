"""A run by a cost table: what the table was not measured for is counted, and noise is drawn by
the seed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ConfigError
from aioserve.plugins import PluginRegistry
from aioserve.simulation.cost import CostTable, StepLoad, StepsOutside, TableSteps
from aioserve.simulation.metrics import metrics_of
from aioserve.simulation.records import Ending, SimulationResult
from aioserve.simulation.simulator import simulate
from aioserve.steps.plan import PENDING_IDS, ItemKind, SampleRow, StepPlan, WorkItem
from aioserve.traces.trace_request import TraceRequest

RATIOS = (0.5, 1.5)
AXES: dict[str, Any] = {"prefill_tokens": [0, 64], "decode_batch": [0, 4]}
SECONDS = [[0.01, 0.02], [0.03, 0.04]]


def table(**fields: Any) -> CostTable:
    given: dict[str, Any] = AXES | {"seconds": SECONDS} | fields
    return CostTable(**given)


def scattered() -> CostTable:
    return table(step_noise=[[RATIOS] * 2] * 2)


def run(cost: Any, *, count: int = 4, prompt_tokens: int = 40, **options: Any) -> SimulationResult:
    """All at once, with answers of ten tokens."""
    trace = [
        TraceRequest(n, 0.0, prompt_tokens, 10, (), max(1, prompt_tokens)) for n in range(count)
    ]
    given: dict[str, Any] = {"num_pages": 4096, "max_num_batched_tokens": 64}
    return simulate(trace, PluginRegistry().policy("fcfs"), cost=cost, **(given | options))


def decode(slot: int, start: int) -> WorkItem:
    return WorkItem(
        kind=ItemKind.DECODE,
        sequence_id=slot,
        slot=slot,
        start=start,
        index=start,
        count=1,
        token_ids=PENDING_IDS,
        rows=(SampleRow(offset=0, slot=slot),),
    )


class Noting:
    """A table, and what was asked of it."""

    def __init__(self) -> None:
        self.loads: list[StepLoad] = []
        self.numbers: list[int] = []

    def step_seconds(self, plan: StepPlan) -> float:
        self.loads.append(StepLoad.of(plan))
        self.numbers.append(plan.step)
        return table().seconds(self.loads[-1])


def outside_of(result: SimulationResult) -> StepsOutside:
    assert result.steps_outside is not None
    return result.steps_outside


def test_a_run_within_what_was_measured_has_no_step_outside() -> None:
    assert outside_of(run(table())) == StepsOutside(0, 0.0, None)
    assert run(Noting()).steps_outside is None


@pytest.mark.parametrize(
    ("fields", "options", "first"),
    [
        ({"prefill_tokens": [0, 32]}, {}, "prefill_tokens = 64 (measured: 0 to 32)"),
        ({}, {"count": 6}, "decode_batch = 6 (measured: 0 to 4)"),
        ({"max_context_tokens": 90}, {}, "context_tokens = 124 (measured: 0 to 90)"),
        ({"max_attended_pairs": 900}, {}, "attended_pairs = 1,120 (measured: 0 to 900)"),
        ({"decode_batch": [1, 4]}, {}, "decode_batch = 0 (measured: 1 to 4)"),
    ],
)
def test_steps_that_were_not_measured_are_counted_and_the_first_is_named(
    fields: dict[str, Any], options: dict[str, Any], first: str
) -> None:
    seen = Noting()
    expected = run(seen, **options)
    cost = table(**fields)
    found = outside_of(run(cost, **options))
    outside = [reason for load in seen.loads if (reason := cost.outside(load))]
    assert found.steps == len(outside) > 0
    assert found.share == len(outside) / expected.steps
    assert found.first == outside[0]
    assert outside[0] == first


def test_a_table_can_serve_several_runs_and_counts_each_for_itself() -> None:
    cost = table()
    outside = [outside_of(run(cost, count=count)).steps for count in (6, 4, 6)]
    assert outside[1] == 0
    assert outside[0] == outside[2] > 0


def test_the_share_of_steps_that_were_not_measured_is_among_the_metrics() -> None:
    result = run(table(), count=6)
    assert metrics_of(result).steps_outside == result.steps_outside


def test_scatter_is_of_the_seed_and_the_same_each_time() -> None:
    runs = [run(scattered(), noise_seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].requests != runs[2].requests
    # Without a seed, to the digit what the table says.
    assert run(scattered()) == run(table())


def test_steps_take_what_the_table_says_times_what_is_drawn_for_their_numbers() -> None:
    cost, seen = scattered(), Noting()
    run(seen, overlap=False)
    result = run(cost, overlap=False, noise_seed=5)
    first = seen.numbers[0]
    assert seen.numbers == list(range(first, first + result.steps))
    expected = [
        cost.noisy_seconds(load, 5, number)
        for load, number in zip(seen.loads, seen.numbers, strict=True)
    ]
    assert result.busy_seconds == pytest.approx(sum(expected))
    assert result.busy_seconds != pytest.approx(run(cost, overlap=False).busy_seconds)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.integers(1, 30),
    st.integers(1, 1000),
    st.sampled_from([None, 0, 7]),
)
def test_several_steps_at_once_are_timed_and_counted_as_one_by_one(
    contexts: list[int], count: int, first: int, seed: int | None
) -> None:
    """`max_context_tokens` is reached at the first step, on the way, or never."""
    cost = table(
        step_noise=[[RATIOS] * 2] * 2, seconds_per_context_token=1.3e-6, max_context_tokens=120
    )

    def plan(step: int) -> StepPlan:
        items = [decode(number, context + step) for number, context in enumerate(contexts)]
        return StepPlan(step=first + step, items=tuple(items))

    single, several = TableSteps(cost, seed), TableSteps(cost, seed)
    expected = [single.step_seconds(plan(step)) for step in range(count)]
    load = StepLoad.of(plan(0))
    assert several.decode_seconds(load, first, count) == expected
    several.count_decodes(load, count)
    assert several.outside == single.outside


@pytest.mark.parametrize("cost", [table(), Noting()])
def test_scatter_of_what_has_none_is_refused(cost: Any) -> None:
    with pytest.raises(ConfigError, match="noise_seed: cost has no noise"):
        run(cost, noise_seed=1)


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5, "one"])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match="noise_seed must be"):
        run(scattered(), noise_seed=seed)


def test_what_is_longer_than_the_model_takes_is_refused_or_cut_short() -> None:
    endings = {
        max_model_len: [
            r.ending for r in run(table(), count=1, max_model_len=max_model_len).requests
        ]
        for max_model_len in (40, 41, 49, 50)
    }
    assert endings == {
        40: [Ending.TOO_LONG],
        41: [Ending.CUT_SHORT],
        49: [Ending.CUT_SHORT],
        50: [Ending.FINISHED],
    }
    # As in an engine, no more than the memory holds.
    (record,) = run(table(), count=1, num_pages=2, max_model_len=1000).requests
    assert record.ending is Ending.TOO_LONG


@pytest.mark.parametrize("value", [1, 0.5, 2**63])
def test_a_model_length_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be"):
        run(table(), max_model_len=value)
