"""Draft models and heads that guess on the thread that launches steps, beside a model on a fake
GPU: they change no token, and those that know what comes are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from aioserve import Speculation
from aioserve.execution.drafts.computed_drafter import ComputedDrafter
from aioserve.testing import run_simulated
from tests.doubles.draft_decoder import DraftDecoder
from tests.doubles.draft_head import HeadOfEntries
from tests.doubles.fake_gpu_model import FakeGpuModel, FakeStepModel
from tests.doubles.gpu_drafts import ModelPlugin, head_beside, model_beside
from tests.execution.gpu.engines import MAX_MODEL_LEN, gpu_of, options_of, serve

Make = Callable[[FakeStepModel, int], ComputedDrafter]

pytestmark = pytest.mark.usefixtures("unmeasured_steps")


def drafts_of(kind: str, wrong_at: frozenset[int] = frozenset()) -> Make:
    if kind == "model":
        decoder = DraftDecoder()
        decoder.wrong_at = wrong_at
        return partial(model_beside, decoder)
    head = HeadOfEntries()
    head.wrong_at = wrong_at
    return partial(head_beside, head)


def options_with(draw: random.Random, plugin: ModelPlugin) -> dict[str, Any]:
    return {
        **options_of(draw),
        "plugins": [plugin],
        "speculation": Speculation(drafter="beside", max_tokens=draw.choice([1, 4, 9])),
    }


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["model", "head"])
def test_what_knows_the_model_is_always_right(kind: str, seed: int, preempts: bool) -> None:
    draw = random.Random(seed)
    plugin = ModelPlugin(drafts_of(kind))
    model = FakeGpuModel(
        seed=seed,
        max_model_len=MAX_MODEL_LEN,
        op_seconds=draw.choice([0.0005, 0.01]),
        graph_sizes=draw.choice([(), (1, 2, 4), (3, 12, 60)]),
        drafts=plugin,
    )
    options = options_with(draw, plugin)
    serving = partial(serve, model, draw, preempts=preempts, **options)
    checker, engine = run_simulated(serving, seed=seed)
    assert not gpu_of(model).violations
    checker.check()
    stats = engine.stats()
    assert stats.drafter_faults_total == 0
    assert stats.tokens_accepted_total == stats.tokens_drafted_total
    assert sum(stats.tokens_drafted_total) > 0
