"""Steps that verify draft tokens on a device that runs ahead.

Each waits for the tokens that it goes on from, and none changes a token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from aioserve import DraftedSequence, DrafterSpec, Speculation, hookimpl
from aioserve.execution.speculation.resolver import Resolver
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.testing import expected_tokens, run_simulated
from tests.doubles.drafters import DraftRule, ScriptedDrafter, anything, nothing_right, right_up_to
from tests.doubles.fake_gpu_model import FakeGpuModel
from tests.execution.gpu.engines import (
    MAX_MODEL_LEN,
    STEPS_FAIL,
    check_but_for_failures,
    gpu_of,
    options_of,
    serve,
    silence,
)

NUM_SEEDS = 102
"""Seeds of the requests of `serve`, further samples included."""


class SeedFinder(ScriptedDrafter):
    """Finds the seed of an answer by its beginning, and drafts the tokens of that seed."""

    def __init__(self, rule: DraftRule) -> None:
        super().__init__(self._found, rule)
        self._asked = -1

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        self._asked = slot
        return super().draft(slot, limit)

    def _found(self, sequence: DraftedSequence, count: int) -> Sequence[int]:
        known = self.known[self._asked]
        prompt, begun = known[: sequence.prompt_tokens], known[sequence.prompt_tokens :][:2]
        for seed in range(NUM_SEEDS):
            if expected_tokens(prompt, len(begun), seed) == begun:
                return expected_tokens(prompt, count, seed)
        raise AssertionError(f"no seed has the tokens {begun} behind {prompt}")


class Plugin:
    def __init__(self, rule: DraftRule) -> None:
        self.drafter = SeedFinder(rule)

    @hookimpl
    def aioserve_drafters(self) -> Sequence[DrafterSpec]:
        return [DrafterSpec("seeds", lambda: self.drafter)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_right_whatever_is_drafted(seed: int) -> None:
    draw = random.Random(seed)
    rule = draw.choice([right_up_to(9), right_up_to(1), nothing_right, anything(draw)])
    model = FakeGpuModel(
        seed=seed,
        max_model_len=MAX_MODEL_LEN,
        op_seconds=draw.choice([0.0005, 0.01]),
        graph_sizes=draw.choice([(), (1, 2, 4), (3, 12, 60)]),
    )
    options = {
        **options_of(draw),
        "plugins": [Plugin(rule)],
        "speculation": Speculation(drafter="seeds", max_tokens=draw.choice([1, 4, 9])),
    }
    serving = partial(serve, model, draw, **options)
    checker, engine = run_simulated(serving, seed=seed)
    assert not gpu_of(model).violations
    checker.check()
    assert checker.ends.keys() <= {"length", "left", "cancelled", "embedded"}
    verified = sum(engine.stats().tokens_drafted_total)
    assert verified > 0 or seed not in (0, 1, 2)  # with these costs of steps, some draft tokens pay


@pytest.mark.usefixtures("unmeasured_steps")
@pytest.mark.parametrize("seed", range(4))
def test_steps_that_fail_cost_their_own_requests_alone(seed: int) -> None:
    draw = random.Random(seed)
    graph_sizes = draw.choice([(), (2, 8, 40)])
    model = FakeGpuModel(
        seed=seed, max_model_len=MAX_MODEL_LEN, graph_sizes=graph_sizes, faults=STEPS_FAIL
    )
    options = {
        **options_of(draw),
        "plugins": [Plugin(anything(draw))],
        "speculation": Speculation(drafter="seeds", max_tokens=5),
    }
    with silence():
        checker, engine = run_simulated(partial(serve, model, draw, 60, **options), seed=seed)
    assert not gpu_of(model).violations
    check_but_for_failures(checker)
    assert sum(engine.stats().tokens_accepted_total) > 0


def test_drafts_that_are_right_take_fewer_steps() -> None:
    def steps(rule: DraftRule) -> int:
        draw = random.Random(2)
        model = FakeGpuModel(seed=2, max_model_len=MAX_MODEL_LEN, graph_sizes=(1, 4, 60))
        options = {
            **options_of(draw),
            "plugins": [Plugin(rule)],
            "speculation": Speculation(drafter="seeds", max_tokens=4),
        }
        _, engine = run_simulated(partial(serve, model, draw, **options), seed=2)
        assert gpu_of(model).num_replays > 0
        return engine.stats().steps_total

    assert steps(right_up_to(9)) < steps(nothing_right)


def test_a_step_whose_tokens_cannot_be_noted_fails_and_nothing_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted, calls = Resolver.noted, 0

    def at_times(self: Resolver, plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
        nonlocal calls
        calls += 1
        if calls % 9 == 0:
            raise RuntimeError("planted")
        return noted(self, plan, outcome)

    monkeypatch.setattr(Resolver, "noted", at_times)
    draw = random.Random(3)
    model = FakeGpuModel(seed=3, max_model_len=MAX_MODEL_LEN)
    options = {
        **options_of(draw),
        "plugins": [Plugin(right_up_to(9))],
        "speculation": Speculation(drafter="seeds", max_tokens=4),
    }
    with silence():
        checker, _ = run_simulated(partial(serve, model, draw, **options), seed=3)
    assert calls > 9
    assert checker.num_open == 0
    assert not checker.wrong_tokens
