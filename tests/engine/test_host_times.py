"""Times that the engine reports for its steps are the times that they took."""

from __future__ import annotations

import asyncio

import pytest

from aioserve import Engine, EngineStats, SamplingParams, SchedulingPolicy, StepError
from aioserve.testing import FakeModel, Faults, SimLoop, run_simulated
from aioserve.testing.fake_model import Fault
from aioserve.text.assembler import TextAssembler

STALL_SECONDS = 0.02
NUM_TOKENS = 5
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


@pytest.mark.parametrize("overlap", [True, False])
def test_step_seconds_are_those_in_which_a_step_was_in_flight(overlap: bool) -> None:
    async def main() -> EngineStats:
        model = FakeModel(step_seconds=lambda plan: 0.25)
        async with Engine(model, overlap=overlap) as engine:
            await asyncio.sleep(3)
            await engine.generate([1, 2, 3], PARAMS)
            await asyncio.sleep(3)
            await asyncio.gather(*(engine.generate([n, 2], PARAMS) for n in range(4)))
            return engine.stats()

    stats = run_simulated(main)
    assert stats.steps_total >= 2 * NUM_TOKENS
    assert stats.step_seconds_total == pytest.approx(0.25 * stats.steps_total)
    # A simulated clock stands still while the engine works.
    host = stats.planning_seconds_total + stats.commit_seconds_total + stats.delivery_seconds_total
    assert host == 0


def test_a_step_that_fails_was_in_flight_too() -> None:
    async def main() -> EngineStats:
        model = FakeModel(step_seconds=lambda plan: 0.25, faults=Faults(at={0: Fault.STEP_RAISES}))
        async with Engine(model, overlap=False) as engine:
            with pytest.raises(StepError):
                await engine.generate([1, 2, 3], PARAMS)
            return engine.stats()

    assert run_simulated(main).step_seconds_total == pytest.approx(0.25)


class Stalling(SchedulingPolicy):
    def __init__(self, *methods: str) -> None:
        self.methods = methods

    def order(self, waiting, view):
        self.stall("order")
        return waiting

    def step_finished(self, step, tokens):
        self.stall("step_finished")

    def stall(self, method: str) -> None:
        if method in self.methods:
            hold_up_the_loop()


def hold_up_the_loop() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    loop.block(STALL_SECONDS)


PARTS = {"order": "planning", "step_finished": "commit", "push": "delivery"}


@pytest.mark.parametrize("stalls", PARTS)
def test_time_is_counted_where_it_goes(stalls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    push = TextAssembler.push

    def slow_push(self: TextAssembler, token_id: int, *, is_end: bool = False) -> tuple[str, bool]:
        hold_up_the_loop()
        return push(self, token_id, is_end=is_end)

    if stalls == "push":
        monkeypatch.setattr(TextAssembler, "push", slow_push)

    async def main() -> EngineStats:
        # Each answer begins alone, so the policy is asked for an order each time.
        async with Engine(FakeModel(), policy=Stalling(stalls)) as engine:
            for _ in range(NUM_TOKENS):
                await engine.generate([1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))
            return engine.stats()

    stats = run_simulated(main)
    assert stats.steps_total == NUM_TOKENS
    seconds = {name: getattr(stats, f"{name}_seconds_total") for name in PARTS.values()}
    assert seconds.pop(PARTS[stalls]) == pytest.approx(NUM_TOKENS * STALL_SECONDS)
    assert [*seconds.values()] == [0, 0]
