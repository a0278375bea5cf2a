"""The fake model in an engine: faults at the steps that were named, and at their rates."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from aioserve import (
    ConfigError,
    Engine,
    EngineError,
    RequestFailedError,
    SamplingParams,
    SchedulingPolicy,
    StepError,
)
from aioserve.steps.plan import SampleRow, SlotStart, WorkItem
from aioserve.testing import (
    FakeDevice,
    FakeModel,
    FakeRunner,
    Fault,
    Faults,
    PlantedError,
    byte_tokenizer,
    expected_tokens,
    random_step_seconds,
    run_simulated,
)
from tests.placed import placed_item, placed_plan

PARAMS = SamplingParams(max_tokens=8, seed=1)


def answer(model: FakeModel, **options) -> tuple[Any, float]:
    """Return the outcome of one request, and the seconds it took."""

    async def main():
        async with Engine(model, policy=SchedulingPolicy(), **options) as engine:
            began = asyncio.get_running_loop().time()
            (result,) = await asyncio.gather(
                engine.generate([1, 2], PARAMS), return_exceptions=True
            )
            return result, asyncio.get_running_loop().time() - began

    return run_simulated(main)


@pytest.mark.parametrize("overlap", [True, False])
def test_without_faults_the_tokens_are_those_expected(overlap):
    result, seconds = answer(FakeModel(step_seconds=lambda plan: 0.5), overlap=overlap)
    assert list(result.token_ids) == expected_tokens([1, 2], 8, seed=1)
    assert seconds == 8 * 0.5


def test_a_time_of_steps_that_is_no_function_is_refused_by_name():
    seconds: Any = 0.01
    with pytest.raises(ConfigError, match=r"step_seconds: must be a function .*, got 0\.01"):
        FakeModel(step_seconds=seconds)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault.LAUNCH_RAISES, StepError, "launch 3"),
        (Fault.STEP_RAISES, StepError, "step 3, after"),
        (Fault.BAD_ROW, RequestFailedError, "the logits are NaN"),
    ],
)
def test_the_named_step_fails(fault, error, message, caplog):
    result, _ = answer(FakeModel(faults=Faults(at={3: fault})))
    assert isinstance(result, error)
    assert isinstance(result, EngineError)
    assert message in str(result)
    if error is StepError:
        assert isinstance(result.__cause__, PlantedError)
        assert "3 failed" in caplog.text


def test_a_slow_step_takes_longer_and_is_right():
    slow = FakeModel(
        step_seconds=lambda plan: 0.5, faults=Faults(at={3: Fault.SLOW}, slow_seconds=60)
    )
    result, seconds = answer(slow)
    assert list(result.token_ids) == expected_tokens([1, 2], 8, seed=1)
    assert seconds == 8 * 0.5 + 60


def test_faults_come_at_their_rates_and_the_same_for_the_same_seed():
    rates = {Fault.STEP_RAISES: 0.1, Fault.SLOW: 0.3}
    drawn = [Faults(rates=rates, seed=9).draw(launch)[0] for launch in range(4000)]
    counts = Counter(drawn)
    assert 300 < counts[Fault.STEP_RAISES] < 500
    assert 1000 < counts[Fault.SLOW] < 1400
    assert counts[Fault.BAD_ROW] == counts[Fault.LAUNCH_RAISES] == 0
    assert drawn == [Faults(rates=rates, seed=9).draw(launch)[0] for launch in range(4000)]
    assert drawn != [Faults(rates=rates, seed=8).draw(launch)[0] for launch in range(4000)]


def test_random_step_lengths_are_within_their_bounds_and_repeat():
    draw, again = (random_step_seconds(0.1, 0.2, seed=4) for _ in range(2))
    plan = None
    seconds = [draw(plan) for _ in range(100)]  # pyright: ignore[reportArgumentType]
    assert all(0.1 <= each <= 0.2 for each in seconds)
    assert len(set(seconds)) == 100
    assert seconds == [again(plan) for _ in range(100)]  # pyright: ignore[reportArgumentType]


def test_the_tokenizer_has_one_token_per_byte():
    tokenizer = byte_tokenizer()
    text = "naïve \u2603"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_a_plan_that_writes_under_a_step_in_flight_is_refused():
    def item(slot: int, start: int, count: int, pages: list[int], *others: int) -> WorkItem:
        return placed_item(
            sequence_id=slot,
            slot=slot,
            start=start,
            count=count,
            token_ids=np.array([0] * count, np.int32),
            page_ids=np.array(pages, np.int32),
            rows=tuple(SampleRow(offset=count - 1, slot=each) for each in (slot, *others)),
        )

    async def main() -> None:
        device = FakeDevice(8, 4, num_slots=4)
        runner = FakeRunner(device, FakeModel(step_seconds=lambda plan: 1.0))
        starts = tuple(SlotStart(slot=slot, params=PARAMS, seed=0) for slot in range(4))
        first = item(1, 0, 6, [5, 3], 2)
        done = runner.launch(placed_plan(step=0, items=(first,), started_slots=starts))
        # Its slots may write what it named, and others may read.
        items = (item(1, 6, 1, [5, 3]), item(3, 4, 1, [5, 7]))
        runner.launch(placed_plan(step=1, items=items))
        for other in (item(3, 4, 1, [7, 3]), item(0, 0, 2, [5])):
            with pytest.raises(ValueError, match=r"writes page [35] .* still in flight"):
                runner.launch(placed_plan(step=2, items=(other,)))
        await done
        await asyncio.sleep(5)
        await runner.launch(placed_plan(step=2, items=(item(3, 4, 1, [7, 3]),)))

    run_simulated(main)
