"""Steps on a device: in order, as many as there are buffers, each with its own inputs."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.execution.gpu.waiting import Threads
from aioserve.execution.gpu.worker import CudaWorker
from aioserve.execution.host import Host
from aioserve.execution.step_arrays import PlanReader
from aioserve.steps.pages import PageCopy
from aioserve.testing import expected_tokens, run_simulated
from aioserve.testing.fake_device import entries_of
from tests.doubles.fake_gpu import FakeGpu
from tests.execution.gpu.plans import (
    NUM_SLOTS,
    PAGE_SIZE,
    decode,
    item,
    pages_of,
    plan,
    runner_of,
    simulated_runner,
    step_model,
    threaded_gpu,
    threads_of,
)
from tests.waits import until

PROMPT = [7, 1, 8, 2, 8, 1]


@pytest.mark.parametrize("seed", range(6))
def test_a_step_takes_its_tokens_from_the_step_before_on_the_device(seed):
    async def main() -> None:
        gpu = FakeGpu(seed=seed)
        runner = simulated_runner(gpu)
        handles = [runner.launch(plan(0, item(1, 0, PROMPT), item(2, 0, [5]), started=(1, 2)))]
        for step in range(1, 6):
            handles.append(runner.launch(plan(step, decode(2, step), decode(1, 5 + step))))
        outcomes = [await handle for handle in handles]
        assert [outcome.step for outcome in outcomes] == list(range(6))
        first = [outcomes[0].token_ids[0], *(each.token_ids[1] for each in outcomes[1:])]
        second = [outcomes[0].token_ids[1], *(each.token_ids[0] for each in outcomes[1:])]
        assert first == expected_tokens(PROMPT, 6, seed=1)
        assert second == expected_tokens([5], 6, seed=2)
        assert not gpu.violations
        assert len(runner.wake_delays_seconds) == 6
        await runner.aclose()

    run_simulated(main, seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_copies_come_after_what_they_read_and_before_what_reads_them(seed):
    """A prompt's last page is copied for two forks, goes to the host, and comes back elsewhere."""

    async def main() -> None:
        gpu = FakeGpu(seed=seed, op_seconds=0.01)
        runner = simulated_runner(gpu)
        prompt = plan(0, item(1, 0, PROMPT, rows=(1, 2, 3)), started=(1, 2, 3))
        first, last = pages_of(1)[:2].tolist()
        copies = (
            PageCopy(0, last, 0, 20, 2),
            PageCopy(0, 20, 0, 21, 2),
            PageCopy(0, last, 1, 3, 2),
            PageCopy(1, 3, 0, 22, 2),
        )
        forks = [decode(slot, 6, pages=[first, page]) for slot, page in ((1, 20), (2, 21), (3, 22))]
        handles = [runner.launch(prompt), runner.launch(plan(1, *forks, copies=copies))]
        outcomes = [await handle for handle in handles]
        for row, slot in enumerate((1, 2, 3)):
            tokens = [outcome.token_ids[row] for outcome in outcomes]
            assert tokens == expected_tokens(PROMPT, 2, seed=slot)
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main, seed=seed)


def test_copies_run_beside_a_step_that_writes_none_of_their_sources():
    """A page comes from the host while the device computes a long step."""

    def seconds(name: str) -> float:
        return 1.0 if name == "keys and values" else 0.001

    async def main() -> None:
        gpu = FakeGpu(op_seconds=seconds)
        runner = simulated_runner(gpu)
        await runner.launch(plan(0, item(1, 0, PROMPT), started=(1, 2)))
        await runner.launch(plan(1, copies=[PageCopy(0, 4, 1, 0, 4)]))
        gpu.history.clear()
        back = PageCopy(1, 0, 0, 30, 4)
        long = runner.launch(plan(2, item(2, 0, [3] * 12)))
        beside = runner.launch(plan(3, decode(1, 6), copies=[back]))
        await asyncio.gather(long, beside)
        done = list(gpu.history)
        assert done.index("page copies") < done.index("keys and values")
        # A copy that reads what the long step writes comes after it.
        gpu.history.clear()
        source = int(pages_of(2)[0])
        long = runner.launch(plan(4, item(2, 0, [3] * 12)))
        behind = plan(5, decode(1, 7), copies=[PageCopy(0, source, 0, 31, 4)])
        await asyncio.gather(long, runner.launch(behind))
        done = list(gpu.history)
        assert done.index("page copies") > done.index("samples")
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)


def test_whatever_made_the_model_is_waited_for_before_the_first_step():
    async def main() -> None:
        gpu = FakeGpu()
        model: Any = step_model(gpu)
        runner = simulated_runner(gpu, model)
        synchronized: list[int] = []
        pack = model.pack

        def noted(*args):
            synchronized.append(gpu.num_synchronized)
            return pack(*args)

        model.pack = noted
        await runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        await runner.launch(plan(1, decode(1, 6)))
        assert synchronized == [1, 1]
        await runner.aclose()

    run_simulated(main)


def test_as_many_steps_are_on_the_device_as_there_are_blocks():
    async def main() -> None:
        gpu = FakeGpu(seed=1)
        runner = simulated_runner(gpu)
        handles = [runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))]
        handles += [runner.launch(plan(step, decode(1, 5 + step))) for step in range(1, 9)]
        assert len(runner._in_flight) == 2
        outcomes = [await handle for handle in handles]
        tokens = [outcome.token_ids[0] for outcome in outcomes]
        assert tokens == expected_tokens(PROMPT, 9, seed=1)
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)


def test_a_plan_that_cannot_be_read_fails_its_step_alone():
    """Slots that it starts have started all the same, as the scheduler assumes."""

    async def main() -> None:
        runner = simulated_runner(FakeGpu())
        good = runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        bad = runner.launch(plan(1, item(5, 0, [1]), started=(2,)))
        after = runner.launch(plan(2, decode(1, 6), item(2, 0, [5])))
        assert (await good).token_ids == tuple(expected_tokens(PROMPT, 1, seed=1))
        with pytest.raises(InvariantError, match=r"slots \[5\] sample"):
            await bad
        expected = (expected_tokens(PROMPT, 2, seed=1)[1], *expected_tokens([5], 1, seed=2))
        assert (await after).token_ids == expected
        await runner.aclose()

    run_simulated(main)


def test_steps_without_rows_or_without_items_end_too():
    async def main() -> None:
        gpu = FakeGpu(seed=2)
        runner = simulated_runner(gpu)
        chunk = item(1, 0, PROMPT[:3], rows=())
        rest = item(1, 3, PROMPT[3:])
        copy = PageCopy(0, 4, 0, 30, 4)
        plans = (plan(0, chunk, started=(1,)), plan(1, copies=[copy]), plan(2, rest), plan(3))
        outcomes = [await handle for handle in [runner.launch(each) for each in plans]]
        assert [outcome.token_ids for outcome in outcomes] == [
            (),
            (),
            tuple(expected_tokens(PROMPT, 1, seed=1)),
            (),
        ]
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)


def test_a_host_drives_the_worker_of_a_device_as_it_does_that_of_a_cpu():
    """The host waits for each step before it begins the next."""
    plans = [plan(0, item(1, 0, PROMPT), started=(1,))]
    plans += [plan(step, decode(1, 5 + step)) for step in range(1, 6)]
    with threaded_gpu() as gpu:
        worker, host = CudaWorker(gpu, step_model(gpu), (1, 4)), Host(PAGE_SIZE, NUM_SLOTS, 1)
        with worker.within():
            outcomes = [host.step(each, host.read(each), worker) for each in plans]
        worker.close()
        assert not gpu.violations
    tokens = [outcome.token_ids[0] for outcome in outcomes]
    assert tokens == expected_tokens(PROMPT, 6, seed=1)


def test_pages_that_are_copied_beside_steps_are_copied_when_the_worker_returns():
    """Copies come after a step in flight that writes what they read."""

    async def main(gpu: FakeGpu) -> None:
        model = step_model(gpu)
        worker = CudaWorker(gpu, model)
        block = PlanReader(PAGE_SIZE, NUM_SLOTS).read(plan(0, item(1, 0, PROMPT), started=(1,)))
        source = int(pages_of(1)[0])
        with worker.within():
            pending = worker.step(block)
            worker.copy(np.array([(0, source, 0, 30, 3)], np.int32))
            entries = model.kv.array[30 * PAGE_SIZE : 30 * PAGE_SIZE + 3]
            assert entries.tolist() == entries_of(np.array(PROMPT), 0, 0)[:3].tolist()
            assert pending.outcome().token_ids == tuple(expected_tokens(PROMPT, 1, seed=1))
        worker.close()

    with threaded_gpu(op_seconds=lambda name: 0.01) as gpu:
        asyncio.run(main(gpu))
        assert not gpu.violations


def test_a_step_with_more_copies_than_a_block_has_room_for():
    async def main() -> None:
        gpu = FakeGpu(seed=2)
        runner = simulated_runner(gpu)
        await runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        first, last = pages_of(1)[:2].tolist()
        copies = [
            PageCopy(0, last + step % 2 * 9, 0, last + 9 - step % 2 * 9, 2) for step in range(801)
        ]
        forked = decode(1, 6, pages=[first, last + 9])
        outcome = await runner.launch(plan(1, forked, copies=copies))
        assert list(outcome.token_ids) == expected_tokens(PROMPT, 2, seed=1)[1:]
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)


def test_an_awaiter_that_was_cancelled_leaves_its_block_to_the_device():
    async def main() -> None:
        gpu = FakeGpu(seed=4, op_seconds=0.05)
        runner = simulated_runner(gpu)
        first = asyncio.ensure_future(runner.launch(plan(0, item(1, 0, PROMPT), started=(1,))))
        await asyncio.sleep(0)
        first.cancel()
        handles = [runner.launch(plan(step, decode(1, 5 + step))) for step in (1, 2, 3)]
        tokens = [(await handle).token_ids[0] for handle in handles]
        assert tokens == expected_tokens(PROMPT, 4, seed=1)[1:]
        assert not gpu.violations
        await runner.aclose()

    run_simulated(main)


# -- with threads


@pytest.mark.parametrize("way", ["block", "spin", "callback"])
def test_two_threads_give_the_same_tokens(way):
    async def main(gpu: FakeGpu) -> None:
        loop_thread = threading.get_ident()
        model: Any = step_model(gpu)
        packed_on: set[int] = set()
        pack = model.pack

        def noted(*args):
            packed_on.add(threading.get_ident())
            return pack(*args)

        model.pack = noted
        runner = runner_of(gpu, model, name="test", graph_sizes=(1, 4), host_side=Threads(way))
        handles = [runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))]
        handles += [runner.launch(plan(step, decode(1, 5 + step))) for step in range(1, 10)]
        tokens = [(await handle).token_ids[0] for handle in handles]
        await runner.aclose()
        assert tokens == expected_tokens(PROMPT, 10, seed=1)
        assert gpu.num_replays == 8
        assert len(packed_on) == 1
        assert loop_thread not in packed_on

    with threaded_gpu(seed=3) as gpu:
        asyncio.run(main(gpu))
        assert not gpu.violations


def test_the_threads_end_with_the_runner():
    async def main(gpu: FakeGpu) -> None:
        runner = runner_of(gpu, step_model(gpu), name="ends")
        assert threads_of("ends") == {"aioserve-ends", "aioserve-ends-waits"}
        handle = runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        await runner.aclose()
        assert (await handle).token_ids == tuple(expected_tokens(PROMPT, 1, seed=1))

    with threaded_gpu() as gpu:
        asyncio.run(main(gpu))
    assert not threads_of("ends")


def test_the_threads_of_a_runner_that_nobody_holds_end():
    async def main(gpu: FakeGpu) -> None:
        runner = runner_of(gpu, step_model(gpu), name="dropped")
        await runner.launch(plan(0, item(1, 0, PROMPT), started=(1,)))
        dropped = weakref.ref(runner)
        del runner

        def is_gone() -> bool:
            gc.collect()
            return dropped() is None and not threads_of("dropped")

        await until(is_gone)

    with threaded_gpu() as gpu:
        asyncio.run(main(gpu))


EXITS_MID_STEP = """
import asyncio, atexit
from tests.doubles.fake_gpu import FakeGpu
from tests.execution.gpu.plans import DeviceThread, item, plan, runner_of, step_model

gpu = FakeGpu(later=DeviceThread().later, op_seconds=lambda name: 0.1)
atexit.register(lambda: print(gpu.history[-1]))

async def main():
    runner = runner_of(gpu, step_model(gpu), name="exits")
    runner.launch(plan(0, item(1, 0, [7, 1]), started=(1,)))
    return runner

runner = asyncio.run(main())
atexit.register(lambda: print(list(gpu.history)))
"""


def test_an_interpreter_that_exits_while_a_step_is_on_the_device_exits_cleanly():
    """The runner's threads end once the step has ended."""
    done = subprocess.run(
        [sys.executable, "-c", EXITS_MID_STEP],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[]\na copy to the host\n"
