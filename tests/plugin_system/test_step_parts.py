"""Observers hear what each step computed of which sequence, and may come and go."""

from __future__ import annotations

import asyncio
import random

import pytest

from aioserve import ConfigError, Engine, Observer, SamplingParams
from aioserve.testing import FakeModel, random_step_seconds, run_simulated


class Steps(Observer):
    def __init__(self) -> None:
        self.steps: list = []
        self.prompt_tokens: dict[str, int] = {}
        self.arrivals: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def arrived(self, requests):
        for request in requests:
            self.prompt_tokens[request.request_id] = request.prompt_tokens
            self.arrivals[request.request_id] = request.arrival_seconds

    def step_finished(self, step):
        self.steps.append(step)

    def finished(self, requests):
        for request in requests:
            self.ended[request.request_id] = request.arrival_seconds


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("overlap", [True, False])
def test_the_parts_of_a_sequence_follow_each_other_from_what_was_cached_on(seed, overlap):
    source = random.Random(seed)
    watched = Steps()
    preempted = 0

    async def one(engine: Engine, number: int) -> None:
        await asyncio.sleep(source.uniform(0, 0.3))
        params = SamplingParams(max_tokens=source.randint(1, 20), n=source.choice([1, 1, 2]))
        prompt = [number % 3] * source.randint(1, 30)
        await engine.generate(prompt, params, request_id=f"r{number}")

    async def main() -> None:
        nonlocal preempted
        model = FakeModel(
            num_pages=14,
            max_model_len=64,
            step_seconds=random_step_seconds(0.001, 0.1, seed=seed),
        )
        options = {"overlap": overlap, "page_size": 4, "output_reserve_tokens": 0}
        engine = Engine(model, max_num_batched_tokens=16, **options)
        engine.observe(watched)
        async with engine:
            await asyncio.gather(*(one(engine, number) for number in range(20)))
            await asyncio.sleep(1)
            preempted = engine.stats().preemptions_total

    run_simulated(main, seed=seed)
    assert watched.ended == watched.arrivals
    computed: dict[tuple[str, int], int] = {}
    last_end = 0.0
    for step in watched.steps:
        assert last_end <= step.begin_seconds < step.end_seconds
        last_end = step.end_seconds
        pages = (step.pages_free, step.pages_fenced, step.pages_cached, step.pages_held_by_requests)
        assert sum(pages) == 14
        assert sum(part.num_tokens for part in step.parts) <= step.computed_tokens
        for gone in step.preempted:
            computed.pop(gone, None)
        for part in step.parts:
            key = (part.request_id, part.sample)
            if key in computed:
                assert part.start_tokens == computed[key]
            computed[key] = part.start_tokens + part.num_tokens
            prompt_tokens = watched.prompt_tokens[part.request_id]
            assert part.is_decode == (part.num_tokens == 1 and part.start_tokens >= prompt_tokens)
            assert bool(part.num_sampled) >= part.is_decode
    told = sum(len(step.preempted) for step in watched.steps)
    assert told <= preempted
    assert (told > 0) == (preempted > 0)


def test_an_observer_is_told_until_it_is_taken_away():
    watched = Steps()

    async def main() -> None:
        async with Engine(FakeModel()) as engine:
            assert engine.state == "open"
            await engine.generate([1], SamplingParams(max_tokens=2))
            stop = engine.observe(watched)
            assert engine.dump()["observers"] == ["Steps"]
            await engine.generate([1], SamplingParams(max_tokens=2), request_id="seen")
            stop()
            stop()
            await engine.generate([1], SamplingParams(max_tokens=2))
            assert engine.dump()["observers"] == []
        assert engine.state == "closed"
        assert list(watched.ended) == ["seen"]
        assert all(part.request_id == "seen" for step in watched.steps for part in step.parts)

    run_simulated(main)


def test_what_is_no_observer_is_refused() -> None:
    class Late(Observer):
        async def finished(self, requests):
            pass

    engine = Engine(FakeModel())
    for wrong in (object(), Late()):
        with pytest.raises(ConfigError, match=r"Observer|finished"):
            engine.observe(wrong)  # pyright: ignore[reportArgumentType]


class Ends(Observer):
    """Wants to hear nothing of steps."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def arrived(self, requests):
        self.heard += [f"arrived {request.request_id}" for request in requests]

    def finished(self, requests):
        self.heard += [f"finished {request.request_id}" for request in requests]


@pytest.mark.asyncio
async def test_parts_are_made_only_where_an_observer_wants_steps(monkeypatch):
    made = []
    monkeypatch.setattr("aioserve.engine.observer_events._part", lambda *_: made.append(1))
    ends = Ends()
    async with Engine(FakeModel(num_pages=64)) as engine:
        engine.observe(ends)
        for name in "ab":
            await engine.generate([1, 2], SamplingParams(max_tokens=9), request_id=name)
        assert made == []
        engine.observe(Steps())
        await engine.generate([1, 2], SamplingParams(max_tokens=9), request_id="c")
        assert made != []
    told = [f"{what} {name}" for name in "abc" for what in ("arrived", "finished")]
    assert ends.heard == told
