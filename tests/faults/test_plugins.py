"""Plugins of every kind that misbehave at once: every answer is right, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from itertools import count, repeat
from typing import Any

import pytest

from aioserve import (
    EvictionSpec,
    Observer,
    ObserverSpec,
    PolicySpec,
    Refusal,
    SchedulingPolicy,
    StepBudget,
    TokenShare,
    Verdict,
    hookimpl,
)
from aioserve.testing import FakeModel
from tests.faults.harness import params, run, watched
from tests.plugin_system.hostile import TOUCHES, contained, hostile


class BadPlugins:
    """Each answers well often enough to be asked again."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.heard: list[str] = []
        self.hostile = (
            hostile(TOUCHES, SystemExit),
            hostile(TOUCHES, asyncio.CancelledError, base=Exception),
        )

    def good_or(self, good: Any, *bad: Any) -> Any:
        if self.source.random() < 0.7:
            return good
        answer = self.source.choice([*bad, *self.hostile])
        if issubclass(type(answer), BaseException):
            raise answer
        return answer

    @hookimpl
    def aioserve_scheduling_policies(self):
        bad = self

        class BadPolicy(SchedulingPolicy):
            seen: set = set()

            def order(self, waiting, view):
                self.seen.update(waiting)
                others = sorted(self.seen, key=lambda request: request.arrival_index)
                doubled = [*waiting, *waiting]
                return bad.good_or(waiting, doubled, others, 3, ValueError("planted"), [])

            def admit(self, request, view):
                return bad.good_or(Verdict.NOW, Verdict.LATER, None, "no", KeyError("planted"))

            def chunk(self, request, budget_tokens, view):
                return bad.good_or(budget_tokens, 10**9, -1, 0, "all", ZeroDivisionError())

            def victim(self, running, need_pages, view):
                return bad.good_or(running[-1], None, next(iter(self.seen), 7), IndexError())

            def preempt(self, running, view):
                return bad.good_or((), running[:1], repeat(running[0]), [None], KeyError())

            def begin_step(self, view):
                share = TokenShare(self.seen, 10**9)
                good = StepBudget([TokenShare(view.running, 1)])
                return bad.good_or(good, StepBudget([share]), StepBudget(tokens=0), 7, OSError())

            def order_prefills(self, running, view):
                return bad.good_or(running, (), [running[0]] * 2, count(), OSError("planted"))

            def decode(self, running, view):
                return bad.good_or(running, (), running[1:], repeat(7), SystemExit(1))

            def reserve(self, request, view):
                return bad.good_or(None, 10**400, -1, float("nan"), KeyError("planted"))

            def drop(self, request, view):
                return bad.good_or(None, True, Verdict.NEVER, ValueError("planted"))

            def pin(self, request):
                return bad.good_or(request.computed_tokens, -1, None, 1e300, OSError("planted"))

            def unpin(self, pins, view):
                return bad.good_or((), pins, [pins[0]] * 2, count(), KeyError("planted"))

            def finished(self, requests):
                bad.good_or(None, OSError("planted"))

        return [PolicySpec("bad", BadPolicy)]

    @hookimpl
    def aioserve_eviction_strategies(self):
        bad = self

        class BadStrategy:
            def key(self, use):
                if bad.source.random() < 0.98:
                    return bad.source.choice([-1, 1]) * use.last_used_tick
                return bad.good_or(None, float("nan"), "x", SystemExit(1), ValueError("planted"))

        return [EvictionSpec("bad", BadStrategy)]

    @hookimpl
    def aioserve_observers(self):
        bad = self

        class BadObserver(Observer):
            def step_finished(self, step):
                bad.good_or(None, ValueError("planted"))

            def finished(self, requests):
                bad.heard += [request.request_id for request in requests]
                bad.good_or(None, ValueError("planted"))

        class GoodObserver(Observer):
            def finished(self, requests):
                bad.heard += [request.request_id for request in requests]

        return [ObserverSpec("bad", BadObserver), ObserverSpec("good", GoodObserver)]

    @hookimpl
    def aioserve_admit(self, request):
        return self.good_or(None, Refusal("planted"), False, ValueError("planted"))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(8))
@contained
def test_bad_plugins_of_every_kind_cost_nobody_a_token(seed: int, overlap: bool) -> None:
    run(partial(serve_under_bad_plugins, seed, overlap), seed)


async def serve_under_bad_plugins(seed: int, overlap: bool) -> None:
    source = random.Random(seed)
    plugins = BadPlugins(seed)
    async with watched(
        FakeModel(num_pages=20, max_model_len=64, step_seconds=lambda plan: 0.01),
        policy="bad",
        eviction="bad",
        plugins=[plugins],
        overlap=overlap,
        page_size=4,
        max_num_batched_tokens=16,
        num_host_pages=source.choice([0, 8]),
    ) as checker:

        async def one(number: int) -> str:
            await asyncio.sleep(source.uniform(0, 0.5))
            prompt = [number % 3] * source.randint(1, 12) + [number]
            return await checker.read(
                prompt,
                params(source.randint(1, 20), seed=number),
                leave_after=source.choice([None, None, 2]),
                request_id=f"r{number}",
            )

        ends = await asyncio.gather(*(one(number) for number in range(40)))
    assert set(ends) <= {"length", "left", "RequestRejectedError"}
    assert ends.count("length") > 5
    assert ends.count("RequestRejectedError") > 2
    served = {f"r{number}" for number, end in enumerate(ends) if end != "RequestRejectedError"}
    assert served <= set(plugins.heard)
