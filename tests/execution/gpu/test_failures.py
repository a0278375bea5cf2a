"""Failures of a device: for one step, or for good."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import Any

import pytest

from aioserve import Engine, EngineFailedError, SamplingParams, StepError
from aioserve.errors import InvariantError
from aioserve.execution.gpu.failures import (
    DeviceFailedError,
    HungDeviceError,
    OutOfDeviceMemoryError,
)
from aioserve.execution.gpu.runner import CudaRunner
from aioserve.execution.gpu.waiting import Threads
from aioserve.testing import PlantedError, expected_tokens, run_simulated
from tests.doubles.fake_gpu import FakeGpu
from tests.doubles.fake_gpu_model import FakeGpuModel
from tests.doubles.gpu_faults import GpuFault, GpuFaults
from tests.execution.gpu.engines import MAX_MODEL_LEN, gpu_of, options_of, serve, silence
from tests.execution.gpu.plans import (
    decode,
    item,
    plan,
    runner_of,
    simulated_runner,
    step_model,
    threaded_gpu,
    threads_of,
)
from tests.waits import block_until

PROMPT = [7, 1, 8, 2, 8, 1]
PARAMS = SamplingParams(max_tokens=8, seed=1)
LAUNCHES = 3
"""Kernel launches of one eager step."""


def faults(fault: GpuFault, *launches: int) -> GpuFaults:
    return GpuFaults(at=dict.fromkeys(launches, fault))


@pytest.mark.parametrize("graph_sizes", [(), (1, 4)])
@pytest.mark.parametrize("launch", range(LAUNCHES, 2 * LAUNCHES))
def test_a_step_that_finds_no_memory_is_enqueued_once_more(launch, graph_sizes, caplog):
    async def main() -> None:
        gpu = FakeGpu(faults=faults(GpuFault.OUT_OF_MEMORY, launch))
        runner = simulated_runner(gpu, graph_sizes=graph_sizes)
        handles = [runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))]
        handles += [runner.launch(plan(step, decode(1, 5 + step))) for step in range(1, 6)]
        tokens = [(await handle).token_ids[0] for handle in handles]
        assert tokens == expected_tokens(PROMPT, 6, seed=1)
        assert gpu.num_frees == 1
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)
    assert caplog.text.count("enqueued once more") == 1


def test_a_graph_that_finds_no_memory_is_run_eagerly():
    """The padded decode is captured after its first run. Steps take 3, 3, then 1 launch each."""

    async def main() -> None:
        gpu = FakeGpu(faults=faults(GpuFault.OUT_OF_MEMORY, 2 * LAUNCHES + 1))
        runner = simulated_runner(gpu, graph_sizes=(4,))
        handles = [runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))]
        handles += [runner.launch(plan(step, decode(1, 5 + step))) for step in range(1, 6)]
        tokens = [(await handle).token_ids[0] for handle in handles]
        assert tokens == expected_tokens(PROMPT, 6, seed=1)
        assert gpu.num_frees == 1
        assert gpu.num_replays == 3
        await runner.aclose()

    with silence():
        run_simulated(main)


def test_a_step_that_finds_no_memory_twice_fails_alone_and_when_its_work_has_ended():
    """Work of the failed step still writes to its pages, which are given away afterwards."""

    async def main() -> None:
        # The second and the fourth launch of the step: its first kernel runs in both attempts.
        gpu = FakeGpu(faults=faults(GpuFault.OUT_OF_MEMORY, 4, 6), op_seconds=lambda name: 1.0)
        runner = simulated_runner(gpu)
        first = runner.launch(plan(0, item(1, 0, PROMPT), item(2, 0, [5]), started=(1, 2)))
        failing = runner.launch(plan(1, decode(1, 6)))
        after = runner.launch(plan(2, decode(2, 1)))
        await first
        began = asyncio.get_running_loop().time()
        with pytest.raises(OutOfDeviceMemoryError, match="launch 6"):
            await failing
        assert asyncio.get_running_loop().time() - began > 2.9  # a copy, and a kernel twice
        assert (await after).token_ids == (expected_tokens([5], 2, seed=2)[1],)
        await runner.aclose()

    with silence():
        run_simulated(main)


@pytest.mark.parametrize("launch", range(3))
def test_a_launch_that_is_refused_fails_its_step_alone(launch):
    async def main() -> None:
        gpu = FakeGpu(faults=faults(GpuFault.RAISES, launch))
        runner = simulated_runner(gpu)
        failing = runner.launch(plan(0, item(1, 0, PROMPT), started=(1, 2)))
        after = runner.launch(plan(1, item(2, 0, PROMPT)))
        with pytest.raises(PlantedError):
            await failing
        assert (await after).token_ids == tuple(expected_tokens(PROMPT, 1, seed=2))
        assert gpu.num_frees == 0
        await runner.aclose()

    run_simulated(main)


def test_a_row_that_cannot_be_sampled_is_named_with_its_reason():
    async def main() -> None:
        runner = simulated_runner(FakeGpu(faults=faults(GpuFault.BAD_ROW, 2)))
        work = item(1, 0, PROMPT, rows=(1, 2, 3))
        outcome = await runner.launch(plan(0, work, started=(1, 2, 3)))
        ((row, error),) = outcome.row_errors.items()
        assert error == "the logits have a NaN"
        for other in {0, 1, 2} - {row}:
            assert outcome.token_ids[other] == expected_tokens(PROMPT, 1, seed=other + 1)[0]
        await runner.aclose()

    run_simulated(main)


def test_a_status_that_there_is_not_fails_the_step():
    async def main() -> None:
        gpu = FakeGpu()
        model: Any = step_model(gpu)
        runner = simulated_runner(gpu, model)
        buffers = runner._worker._free_buffers[0]
        await runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))

        def spoil(access) -> None:
            access.write(runner._worker._results, slice(8, 12), 77)

        pack = model.pack

        def spoiled(*args):
            packed = pack(*args)
            enqueue = type(packed).enqueue

            class Spoiled:
                num_bytes, result_shape = packed.num_bytes, packed.result_shape
                variant = packed.variant

                def enqueue(self, *memories):
                    enqueue(packed, *memories)

                def finish(self, *memories):
                    gpu.current_stream.launch("spoil", spoil)

            return Spoiled()

        model.pack = spoiled
        with pytest.raises(InvariantError, match="row 0 has the status"):
            await runner.launch(plan(1, decode(1, 6)))
        assert buffers in runner._worker._free_buffers
        await runner.aclose()

    run_simulated(main)


def test_a_fake_gpu_refuses_to_change_logits_that_it_has_not():
    async def main() -> None:
        async with Engine(FakeGpuModel()) as engine:
            with pytest.raises(StepError, match="has no logits to change"):
                await engine.generate([1, 2], SamplingParams(max_tokens=3, presence_penalty=1.0))
            assert (await engine.generate([1, 2], PARAMS)).token_ids

    run_simulated(main)


# -- for good


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("launch", [0, 4, 20])
def test_a_device_that_breaks_ends_the_engine_and_every_stream_with_the_reason(launch, seed):
    async def main() -> None:
        model = FakeGpuModel(seed=seed, faults=faults(GpuFault.BREAKS, launch))
        async with Engine(model) as engine:
            reads = [engine.generate([slot, 1], PARAMS) for slot in range(3)]
            results = await asyncio.gather(*reads, return_exceptions=True)
            for error in results:
                assert isinstance(error, EngineFailedError)
                assert "fake gpu" in str(error)
                assert "made an illegal access, as planted" in str(error)
                assert isinstance(error.__cause__, DeviceFailedError)
            assert engine.dump()["state"] == "failed"
            with pytest.raises(EngineFailedError, match="illegal access"):
                await engine.generate([1], PARAMS)

    with silence():
        run_simulated(main, seed=seed)


def test_every_later_launch_of_a_broken_device_fails():
    async def main() -> None:
        gpu = FakeGpu(faults=faults(GpuFault.BREAKS, 1))
        runner = simulated_runner(gpu)
        handles = [
            runner.launch(plan(0, item(1, 0, PROMPT), started=(1,))),
            runner.launch(plan(1, decode(1, 6))),
            runner.launch(plan(2, decode(1, 7))),
        ]
        for handle in handles:
            with pytest.raises(DeviceFailedError):
                await handle
        with pytest.raises(DeviceFailedError):
            await runner.launch(plan(3, decode(1, 8)))
        await runner.aclose()

    with silence():
        run_simulated(main)


@pytest.mark.parametrize("seed", range(6))
def test_engines_whose_device_breaks_in_the_middle_end_every_request_once(seed):
    draw = random.Random(seed)
    model = FakeGpuModel(
        seed=seed,
        max_model_len=MAX_MODEL_LEN,
        graph_sizes=(2, 12),
        faults=faults(draw.choice([GpuFault.BREAKS, GpuFault.HANGS]), draw.randrange(100)),
        hung_seconds=2.0,
    )
    with silence():
        checker, engine = run_simulated(partial(serve, model, draw, **options_of(draw)), seed=seed)
    assert not gpu_of(model).violations
    assert not checker.wrong_tokens
    assert not checker.wrong_ends
    assert checker.num_open == 0
    assert checker.ends["EngineFailedError"]
    assert engine.stats().steps_total


# -- hung


def test_a_step_that_does_not_end_is_given_up_and_described(caplog):
    async def main() -> None:
        gpu = FakeGpu(faults=faults(GpuFault.HANGS, LAUNCHES))
        runner = simulated_runner(gpu, hung_seconds=5.0)
        loop = asyncio.get_running_loop()
        await runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        began = loop.time()
        handles = [runner.launch(plan(step, decode(1, 5 + step))) for step in (1, 2, 3)]
        for handle in handles:
            with pytest.raises(HungDeviceError, match="step 1 hasn't ended after 5"):
                await handle
        assert 5.0 <= loop.time() - began <= 10.1
        await asyncio.wait_for(runner.aclose(), 1.0)

    run_simulated(main)
    for described in (
        "step 1: 1 tokens of 1 sequences, eager, 0 page copies, enqueued",
        "step 2: 1 tokens of 1 sequences",
        "step 3, which waits",
    ):
        assert described in caplog.text


def test_slow_steps_are_not_given_up_while_they_end():
    async def main() -> None:
        gpu = FakeGpu(op_seconds=lambda name: 0.7)
        runner = simulated_runner(gpu, hung_seconds=5.0)
        handles = [runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))]
        handles += [runner.launch(plan(step, decode(1, 5 + step))) for step in range(1, 9)]
        tokens = [(await handle).token_ids[0] for handle in handles]
        assert tokens == expected_tokens(PROMPT, 9, seed=1)
        await asyncio.sleep(100)  # nothing is given up while nothing is in flight
        assert len(await gather(runner, 9)) == 1
        await runner.aclose()

    async def gather(runner: CudaRunner, step: int) -> tuple[int, ...]:
        return (await runner.launch(plan(step, decode(1, 5 + step)))).token_ids

    run_simulated(main)


def test_a_loop_that_was_held_up_takes_no_step_for_hung():
    async def main(gpu: FakeGpu) -> None:
        runner = runner_of(gpu, step_model(gpu), name="late", hung_seconds=0.1)
        handle = runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        await asyncio.sleep(0)
        block_until(lambda: (step := runner._oldest()) is not None and step.is_done)
        time.sleep(0.2)  # and the loop hasn't heard of it
        assert (await handle).token_ids == tuple(expected_tokens(PROMPT, 1, seed=1))
        await runner.aclose()

    with threaded_gpu() as gpu:
        asyncio.run(main(gpu))


def test_threads_that_hang_hold_nobody_up():
    async def main(gpu: FakeGpu) -> None:
        runner = runner_of(
            gpu,
            step_model(gpu),
            name="hung",
            host_side=Threads(),
            hung_seconds=0.3,
        )
        with pytest.raises(HungDeviceError):
            await runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        await runner.aclose()
        assert threads_of("hung")
        gpu.break_for_good("the test is over")  # lets the thread go

    with silence(), threaded_gpu(faults=faults(GpuFault.HANGS, 1)) as gpu:
        asyncio.run(main(gpu))
