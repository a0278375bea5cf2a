"""Whole engines whose runner drives a fake GPU: every token is right, whatever the device does.

Mistakes in the order between streams, or between the host and a stream, show as violations that the
fake GPU notes, or in the tokens.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from aioserve.testing import run_simulated
from tests.doubles.fake_gpu_model import FakeGpuModel
from tests.doubles.gpu_faults import GpuFault, GpuFaults
from tests.execution.gpu.engines import MAX_MODEL_LEN, gpu_of, options_of, serve, silence


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(24))
def test_tokens_are_right_whatever_the_order_of_the_work(seed):
    draw = random.Random(seed)
    options = options_of(draw)
    model = FakeGpuModel(
        seed=seed,
        max_model_len=MAX_MODEL_LEN,
        op_seconds=draw.choice([0.0005, 0.01]),
        graph_sizes=draw.choice([(), (1, 2, 4), (3, 12)]),
        capture_at_start=draw.random() < 0.3,
    )
    serving = partial(serve, model, draw, preempts=seed % 2 == 1, **options)
    checker, engine = run_simulated(serving, seed=seed)
    assert not gpu_of(model).violations
    checker.check()
    assert checker.ends.keys() <= {"length", "left", "cancelled", "embedded"}
    assert engine.stats().preemptions_total > (10 if seed % 2 else -1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_steps_that_fail_cost_their_own_requests_alone(seed):
    """Launches are refused, find no memory, or compute NaN, at random."""
    draw = random.Random(seed)
    kinds = (GpuFault.OUT_OF_MEMORY, GpuFault.RAISES, GpuFault.BAD_ROW)
    model = FakeGpuModel(
        seed=seed,
        max_model_len=MAX_MODEL_LEN,
        graph_sizes=draw.choice([(), (2, 8, 12)]),
        faults=GpuFaults(rates=dict.fromkeys(kinds, 0.01)),
    )
    options = options_of(draw)
    with silence():
        checker, _ = run_simulated(partial(serve, model, draw, 60, **options), seed=seed)
    assert not gpu_of(model).violations
    assert not checker.wrong_tokens
    assert not checker.wrong_ends
    assert checker.num_open == 0
    # The checker expects PlantedError.
    assert all("OutOfDeviceMemoryError" in failed for failed in checker.failed_steps)
    ends = {"length", "left", "cancelled", "embedded", "StepError", "RequestFailedError"}
    assert checker.ends.keys() <= ends
    assert checker.ends["length"] + checker.ends["embedded"] > 10


def test_the_same_seed_is_the_same_run():
    def ends(seed: int) -> tuple[object, ...]:
        draw = random.Random(6)
        model = FakeGpuModel(seed=seed, max_model_len=MAX_MODEL_LEN, graph_sizes=(2, 8))
        checker, engine = run_simulated(partial(serve, model, draw, **options_of(draw)), seed=6)
        gpu = gpu_of(model)
        return (checker.ends, engine.stats().steps_total, gpu.num_launches, gpu.num_replays)

    assert ends(5) == ends(5)
    assert ends(5) != ends(6)
