"""Everything that goes wrong, in an engine whose steps verify draft tokens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from aioserve import SamplingParams, SchedulingPolicy, Speculation
from aioserve.drafting.drafter import Drafter
from aioserve.scheduling.view import RequestView, SchedulerView
from aioserve.testing import FakeModel, Fault, Faults, random_step_seconds
from tests.doubles.drafters import (
    DraftRule,
    FakeModelDrafters,
    anything,
    nothing_right,
    right_up_to,
)
from tests.faults.harness import STEP_SECONDS, run, watched

NUM_SEEDS = 5


def seed_of(prompt: Sequence[int]) -> int:
    return sum(prompt) % NUM_SEEDS


def some_rule(draw: random.Random) -> DraftRule:
    return draw.choice([right_up_to(99), right_up_to(2), nothing_right, anything(draw)])


class Moody(SchedulingPolicy):
    """Allows all draft tokens, some, or none."""

    def __init__(self, draw: random.Random) -> None:
        self.draws = draw

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        return self.draws.choice([0, limit, self.draws.randint(0, limit)])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_steps_fail_readers_leave_and_memory_runs_short_and_every_token_is_right(
    seed: int, overlap: bool
) -> None:
    draw = random.Random(seed)
    windows: dict[str, Any] = {"num_window_groups": 1, "window": 7} if seed % 3 == 0 else {}

    async def main() -> None:
        model = FakeModel(
            step_seconds=random_step_seconds(0.0, 2 * STEP_SECONDS, seed=seed),
            faults=Faults(rates=dict.fromkeys(Fault, 0.02), seed=seed),
            eos_token_ids=frozenset([draw.randrange(256)]),
            **windows,
        )
        page_size = draw.choice([1, 4, 16])
        options = {
            "page_size": page_size,
            "num_pages": draw.choice([24, 96]) * 16 * (1 + bool(windows)) // page_size,
            "prefix_caching": draw.random() < 0.8,
            "overlap": overlap,
            "max_num_batched_tokens": draw.choice([8, 32, 2048]),
            "policy": Moody(draw) if draw.random() < 0.5 else SchedulingPolicy(),
            "speculation": Speculation(drafter="scripted", max_tokens=draw.choice([1, 3, 9])),
            "plugins": [FakeModelDrafters(some_rule(draw), seed_of)],
            **draw.choice([{}, {"num_host_pages": 24, "preemption": "swap"}]),
        }
        async with watched(model, max_num_seqs=6, max_buffered_tokens=8, **options) as checker:

            async def request() -> None:
                await asyncio.sleep(draw.random())
                prompt = [draw.randrange(3)] * draw.randint(1, 90)
                params = SamplingParams(
                    max_tokens=draw.randint(1, 60),
                    seed=seed_of(prompt),
                    n=draw.choice([1, 1, 3]),
                    max_draft_tokens=draw.choice([None, None, None, 0, 1]),
                    logprobs=draw.choice([None, None, 0]),
                )
                await checker.read(
                    prompt,
                    params,
                    leave_after=draw.choice([None, None, 1, 10]),
                    pause_seconds=lambda count: draw.random() * draw.choice([0, 0, 0, 1]),
                )

            await asyncio.gather(*(request() for _ in range(40)))
            stats = checker.engine.stats()
            assert sum(stats.tokens_drafted_total) > 0
            assert stats.drafter_faults_total == 0
            assert checker.ends.total() == 40

    run(main, seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", [Fault.STEP_RAISES, Fault.LAUNCH_RAISES, Fault.BAD_ROW])
def test_whichever_step_with_drafts_fails_only_its_requests_end(
    fault: Fault, overlap: bool
) -> None:
    ends: Counter[str] = Counter()
    prompts = [[index] * (5 + 9 * index) for index in range(8)]

    async def main(index: int) -> None:
        model = FakeModel(
            num_pages=16,
            step_seconds=lambda plan: STEP_SECONDS,
            faults=Faults(at={index: fault}, seed=index),
        )
        options = {
            "max_num_batched_tokens": 32,
            "max_num_seqs": 5,
            "overlap": overlap,
            "speculation": Speculation(drafter="scripted", max_tokens=3),
            "plugins": [FakeModelDrafters(right_up_to(index % 4), seed_of)],
        }
        async with watched(model, **options) as checker:
            asked = [(p, SamplingParams(max_tokens=24, seed=seed_of(p))) for p in prompts]
            await asyncio.gather(*(checker.read(*one) for one in [*asked, *asked[4:]]))
            ends.update(checker.ends)
            failed = checker.ends.total() - checker.ends["length"]
            assert failed <= (1 if fault is Fault.BAD_ROW else 5)
            assert await checker.read([1], SamplingParams(max_tokens=40, seed=1)) == "length"
            stats = checker.engine.stats()
            assert sum(stats.tokens_drafted_total) > 0
            assert stats.drafter_faults_total == 0

    for index in range(0, 32, 3):
        run(partial(main, index), seed=index)
    assert ends.keys() == {
        "length",
        "RequestFailedError" if fault is Fault.BAD_ROW else "StepError",
    }


class Broken(Drafter):
    """Raises in each of its methods now and then, or answers what is no draft token."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def _maybe_break(self) -> None:
        if self._draw.random() < 0.1:
            raise RuntimeError("planted")

    def start(self, slot: int, sequence: object) -> None:
        self._maybe_break()

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._maybe_break()

    def end(self, slot: int) -> None:
        self._maybe_break()

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        self._maybe_break()
        odd = [None, [256], [-1], [1] * (limit + 1), ["1"], "12", 7, [1.5], [True]]
        return self._draw.choice([*odd, *[[self._draw.randrange(256)]] * 40])


@pytest.mark.parametrize("seed", range(4))
def test_a_drafter_that_raises_in_any_method_costs_no_request(seed: int) -> None:
    draw = random.Random(seed)

    async def main() -> None:
        plugin = FakeModelDrafters(nothing_right, made=lambda: Broken(draw))
        options = {
            "max_num_seqs": 3,
            "speculation": Speculation(drafter="scripted", max_tokens=4),
            "plugins": [plugin],
        }
        model = FakeModel(num_pages=16, step_seconds=lambda plan: STEP_SECONDS)
        async with watched(model, **options) as checker:
            reads = [
                checker.read([index, *range(index)], SamplingParams(max_tokens=30, seed=index))
                for index in range(20)
            ]
            assert set(await asyncio.gather(*reads)) == {"length"}
            assert checker.engine.stats().drafter_faults_total > 5

    run(main, seed)
