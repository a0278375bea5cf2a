"""Durations of steps on a device, and its idle times, by the clock of a fake one."""

from __future__ import annotations

import asyncio

import pytest

from aioserve.execution.gpu.waiting import Threads
from aioserve.testing import run_simulated
from tests.doubles.fake_gpu import FakeGpu
from tests.doubles.gpu_faults import GpuFault, GpuFaults
from tests.doubles.simulated_host import SimulatedHost
from tests.execution.gpu.plans import (
    decode,
    item,
    plan,
    runner_of,
    simulated_runner,
    step_model,
    threaded_gpu,
)
from tests.tiers import clock_counts

PROMPT = [7, 1, 8, 2, 8, 1]
SECONDS = {"a copy to the device": 0.1, "a copy to the host": 0.2, "a graph": 1.0}
EAGER = 0.1 + 3 * 0.5 + 0.2
"""Duration of an eager step, with three kernels of half a second."""


def op_seconds(name: str) -> float:
    return SECONDS.get(name, 0.5)


def test_a_step_takes_what_its_work_takes_and_the_device_idles_where_it_has_none():
    async def main() -> None:
        gpu = FakeGpu(op_seconds=op_seconds)
        runner = simulated_runner(gpu, graph_sizes=(2,))
        await runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        await runner.launch(plan(1, decode(1, 6)))  # captured after it runs
        times = runner.time_steps()
        first = runner.launch(plan(2, item(1, 7, [3, 4])))
        second = runner.launch(plan(3, decode(1, 9)))
        await first
        assert [time.step for time in times] == [2]
        await second
        await asyncio.sleep(5.0)
        await runner.launch(plan(4, decode(1, 10)))
        prompt, behind, late = times
        assert (prompt.step, prompt.idle_seconds, prompt.graph_size) == (2, None, None)
        assert prompt.seconds == pytest.approx(EAGER)
        assert (behind.step, behind.graph_size) == (3, 2)
        assert behind.seconds == pytest.approx(0.1 + 1.0 + 0.2)
        assert behind.idle_seconds == pytest.approx(0.0)
        assert late.step == 4
        assert late.seconds == pytest.approx(0.1 + 1.0 + 0.2)
        assert late.idle_seconds == pytest.approx(5.0, abs=3 * SimulatedHost.max_seconds)
        again = runner.time_steps()
        await runner.launch(plan(5, decode(1, 11)))
        assert len(times) == 3
        assert [(time.step, time.idle_seconds) for time in again] == [(5, None)]
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)


@pytest.mark.parametrize("seed", range(8))
def test_steps_and_what_is_between_them_are_all_the_time_there_is(seed):
    async def main() -> None:
        gpu = FakeGpu(seed=seed)
        runner = simulated_runner(gpu)
        times = runner.time_steps()
        began = asyncio.get_running_loop().time()
        handles = [runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))]
        handles += [runner.launch(plan(step, decode(1, 5 + step))) for step in range(1, 10)]
        await asyncio.gather(*handles)
        passed = asyncio.get_running_loop().time() - began
        assert [time.step for time in times] == list(range(10))
        idle = sum(time.idle_seconds or 0.0 for time in times)
        known = sum(time.seconds for time in times) + idle
        # Excludes the host's time before the first step and after the last one.
        assert passed - 4 * SimulatedHost.max_seconds <= known <= passed
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main, seed=seed)


def test_a_step_that_failed_has_no_time_and_the_next_one_has():
    async def main() -> None:
        launches = {4: GpuFault.RAISES}  # a kernel of the second step
        gpu = FakeGpu(faults=GpuFaults(at=launches), op_seconds=op_seconds)
        runner = simulated_runner(gpu)
        times = runner.time_steps()
        handles = [
            runner.launch(plan(0, item(1, 0, PROMPT), started=(1,))),
            runner.launch(plan(1, decode(1, 6))),
            runner.launch(plan(2, item(2, 0, PROMPT), started=(2,))),
        ]
        results = await asyncio.gather(*handles, return_exceptions=True)
        assert [isinstance(result, Exception) for result in results] == [False, True, False]
        assert [time.step for time in times] == [0, 2]
        assert times[1].seconds == pytest.approx(EAGER)
        assert times[1].idle_seconds == pytest.approx(0.0, abs=3 * SimulatedHost.max_seconds)
        await runner.aclose()

    run_simulated(main)


@pytest.mark.clock
@pytest.mark.asyncio
async def test_threads_time_steps_on_the_clock_of_the_device():
    with threaded_gpu(op_seconds=lambda name: 0.004) as gpu:
        runner = runner_of(gpu, step_model(gpu), name="timed", host_side=Threads())
        times = runner.time_steps()
        handles = [runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))]
        handles += [runner.launch(plan(step, decode(1, 5 + step))) for step in range(1, 6)]
        await asyncio.gather(*handles)
        assert [time.step for time in times] == list(range(6))
        assert not clock_counts() or all(time.seconds >= 5 * 0.004 for time in times)
        assert all((time.idle_seconds or 0.0) >= 0 for time in times)
        await runner.aclose()
