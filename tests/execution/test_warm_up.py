"""The first steps of a runner stay within its limits, and are done before any request waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, SamplingParams
from aioserve.config import EngineConfig
from aioserve.execution import loading
from aioserve.execution.loading import place
from aioserve.execution.step_thread_runner import StepThreadRunner
from aioserve.execution.warm_up import PROMPT_TOKENS, warm_up
from aioserve.paging.pages import capacity_tokens
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

sizes = st.integers(1, 3 * PROMPT_TOKENS)


class Recorder:
    """A runner that computes nothing and keeps the plans."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        assert masks is None
        self.plans.append(plan)
        future: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
        future.set_result(StepOutcome(step=plan.step, token_ids=(0,) * plan.num_rows))
        return future

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return ()

    async def aclose(self) -> None:
        """Do nothing."""


@given(
    num_pages=sizes,
    page_size=sizes,
    num_groups=st.integers(1, 3),
    max_model_len=sizes,
    max_step_tokens=sizes,
)
def test_its_steps_stay_within_every_limit(
    num_pages, page_size, num_groups, max_model_len, max_step_tokens
):
    runner = Recorder()
    limits = {
        "num_pages": num_pages,
        "page_size": page_size,
        "num_groups": num_groups,
        "max_model_len": max_model_len,
    }
    asyncio.run(warm_up(runner, **limits, max_step_tokens=max_step_tokens))
    started = set[int]()
    tables: dict[int, int] = {}
    longest = 0
    for plan in runner.plans:
        plan.check()
        assert plan.num_tokens <= max_step_tokens
        started -= set(plan.ended_slots)
        started |= {start.slot for start in plan.started_slots}
        for pages in plan.pages:
            assert pages.first == 0
            assert all(0 <= page < num_pages for page in pages.page_ids.tolist())
            assert len(set(pages.page_ids.tolist())) == len(pages.page_ids)
            tables[pages.slot], rest = divmod(len(pages.page_ids), num_groups)
            assert not rest
        for item in plan.items:
            assert item.slot in started
            assert item.end <= min(max_model_len, capacity_tokens(tables[item.slot], page_size))
            longest = max(longest, item.end)
    assert not started, "a slot is left behind"
    room = min(capacity_tokens(num_pages // num_groups, page_size), max_model_len)
    assert longest == (0 if room < 2 else min(PROMPT_TOKENS, room - 1, max_step_tokens) + 1)


@pytest.mark.asyncio
async def test_a_loaded_model_has_drawn_tokens_greedily_and_not(monkeypatch):
    params: list[SamplingParams] = []
    rows = 0
    launch = StepThreadRunner.launch

    def note(self: StepThreadRunner, plan: StepPlan, masks: LateMasks | None = None):
        nonlocal rows
        params.extend(start.params for start in plan.started_slots)
        rows += plan.num_rows
        return launch(self, plan, masks)

    monkeypatch.setattr(StepThreadRunner, "launch", note)
    async with Engine("pyhelp", num_pages=8, max_model_len=64) as engine:
        assert {each.temperature == 0 for each in params} == {True, False}
        assert rows == 4
        assert engine.dump()["model"]["loading_seconds"]["warm_up"] > 0
        assert engine.stats().steps_total == 0


@pytest.mark.asyncio
async def test_a_step_that_fails_ends_the_loading_and_its_thread(monkeypatch):
    closed: list[StepThreadRunner] = []
    aclose = StepThreadRunner.aclose

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the first step fails")

    async def note(self: StepThreadRunner) -> None:
        closed.append(self)
        await aclose(self)

    monkeypatch.setattr(place, "warm_up", fail)
    monkeypatch.setattr(StepThreadRunner, "aclose", note)
    with pytest.raises(RuntimeError, match="the first step fails"):
        await loading.load("pyhelp", EngineConfig(num_pages=8), num_slots=2)
    assert len(closed) == 1
