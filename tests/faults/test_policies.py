"""Scheduling policies that misbehave, each in its own way: the engine serves on, and the log says
whose fault it was."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aioserve import Engine, SchedulingPolicy, Verdict
from aioserve.testing import FakeModel, SimLoop, check_invariants, expected_tokens, run_simulated
from tests.faults.harness import params


class Raises(SchedulingPolicy):
    def chunk(self, request, budget_tokens, view):
        raise ValueError("planted")


class NeverEnds(SchedulingPolicy):
    def order(self, waiting, view):
        while True:
            yield waiting[0]


class Repeats(SchedulingPolicy):
    def order(self, waiting, view):
        return [waiting[0], *waiting]


class NamesOthers(SchedulingPolicy):
    def __init__(self):
        self.seen = []

    def arrived(self, requests):
        self.seen.extend(requests)

    def order(self, waiting, view):
        return [*self.seen[:-1], *waiting]


class Sleeps(SchedulingPolicy):
    def admit(self, request, view):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.block(0.25)
        return Verdict.NOW


class SleepsABit(SchedulingPolicy):
    def order(self, waiting, view):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        for request in waiting:
            loop.block(0.04)
            yield request


async def serve(policy: SchedulingPolicy) -> None:
    model = FakeModel(step_seconds=lambda plan: 0.01)
    async with Engine(model, policy=policy, max_num_seqs=4) as engine:
        prompts = [[1 + n] * (5 + n) for n in range(12)]
        answers = await asyncio.gather(
            *(engine.generate(prompt, params(8, seed=3)) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.token_ids) == expected_tokens(prompt, 8, seed=3)
        await engine.drain()
        check_invariants(engine)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Raises, "scheduling policy Raises: chunk raised ValueError('planted')"),
        (NeverEnds, "scheduling policy NeverEnds: order named RequestView("),
        (Repeats, "scheduling policy Repeats: order named RequestView("),
        (NamesOthers, "scheduling policy NamesOthers: order named RequestView("),
        (Sleeps, "scheduling policy Sleeps is slow: admit took 0.25 s, of 0.25 s in one step"),
        (SleepsABit, "policy SleepsABit is slow: order took 0.04 s, of 0.12 s in one step"),
    ],
)
def test_the_engine_serves_on_and_the_log_names_the_policy(policy, message, caplog):
    caplog.set_level(logging.WARNING)
    run_simulated(lambda: serve(policy()))
    assert message in caplog.text


@pytest.mark.parametrize("policy", [Sleeps, SleepsABit])
def test_a_slow_policy_is_named_once(policy, caplog):
    caplog.set_level(logging.WARNING)
    run_simulated(lambda: serve(policy()))
    assert caplog.text.count("is slow") == 1


def test_a_policy_that_is_quick_is_not_called_slow(caplog):
    caplog.set_level(logging.WARNING)
    run_simulated(lambda: serve(SchedulingPolicy()))
    assert not caplog.records
