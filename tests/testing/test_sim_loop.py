"""The simulated loop: time that jumps, callbacks that are shuffled, and ends that are clear."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from aioserve import ConfigError
from aioserve.testing import DeadlockError, SimLoop, SimulationError, run_simulated
from tests.timing import seconds_at_best
from tests.waits import LIMIT_SECONDS

SEEDS = range(8)


def now() -> float:
    return asyncio.get_running_loop().time()


# -- the clock


@pytest.mark.clock
def test_sleeping_takes_no_time_and_timers_fire_in_order():
    fired = []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.append((seconds, now()))

    async def main() -> None:
        await asyncio.gather(*(sleep(seconds) for seconds in (3600.0, 5.0, 0.25)))

    def run() -> None:
        fired.clear()
        run_simulated(main)

    assert seconds_at_best(run, enough=0.25) < 0.25
    assert fired == [(0.25, 0.25), (5.0, 5.0), (3600.0, 3600.0)]


def test_the_clock_stands_still_while_something_is_ready():
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return now()

    assert run_simulated(main) == 0.0


def test_callbacks_that_spin_let_the_next_timer_fire():
    async def main() -> float:
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, done.set)
        while not done.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        return now()

    assert run_simulated(main) == 1.0


def test_a_blocked_loop_lets_time_pass():
    async def main() -> tuple[float, bool]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        for wrong in (-1, float("nan"), float("inf"), 10**400, True, "1"):
            with pytest.raises(ConfigError, match="at least 0 and finite, got"):
                loop.block(wrong)  # pyright: ignore[reportArgumentType]
        late = loop.create_future()
        loop.call_later(0.5, lambda: late.set_result(now()))
        loop.block(2.0)
        return await late, isinstance(loop, asyncio.AbstractEventLoop)

    assert run_simulated(main) == (2.0, True)


@pytest.mark.parametrize("seed", range(8))
def test_timers_that_are_overdue_fire_in_the_order_of_their_times(seed):
    async def main():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        fired = []
        for when in (1.5, 0.5, 2.0, 1.0):
            loop.call_at(when, fired.append, when)
        loop.block(3.0)
        await asyncio.sleep(1)
        return fired

    assert run_simulated(main, seed=seed) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("seed", range(8))
def test_methods_of_one_object_stay_in_order_also_with_futures_as_arguments(seed):
    async def main():
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(5)]
        queue = asyncio.Queue()
        for future in futures:
            loop.call_soon(queue.put_nowait, future)
        return [futures.index(await queue.get()) for _ in futures]

    assert run_simulated(main, seed=seed) == [0, 1, 2, 3, 4]


def test_cancelled_timers_never_fire_and_are_forgotten():
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        for _ in range(1000):
            loop.call_later(1.0, pytest.fail, "cancelled").cancel()
        fired = loop.call_later(0.0, lambda: None)
        await asyncio.sleep(0.5)
        fired.cancel()
        kept = len(loop._timers)
        await asyncio.sleep(2.0)
        return kept

    assert run_simulated(main) < 300


# -- the order


async def order_of_tasks() -> list[int]:
    order: list[int] = []

    async def append(index: int) -> None:
        order.append(index)
        await asyncio.sleep(0)
        order.append(index)

    async with asyncio.TaskGroup() as group:
        for index in range(6):
            group.create_task(append(index))
    return order


def test_tasks_run_in_an_order_of_the_seeds_own():
    orders = [tuple(run_simulated(order_of_tasks, seed=seed)) for seed in SEEDS]
    assert len(set(orders)) == len(SEEDS)
    assert [tuple(run_simulated(order_of_tasks, seed=seed)) for seed in SEEDS] == orders
    for order in orders:
        # A round runs to its end before what became ready in it.
        assert sorted(order[:6]) == sorted(order[6:]) == list(range(6))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_asyncio_rests_on_stays_in_order(seed):
    seen: dict[str, list[int]] = {"queue": [], "future": [], "tasks": []}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int] = asyncio.Queue()
        future = loop.create_future()
        for index in range(10):
            loop.call_soon(queue.put_nowait, index)
            loop.call_soon(seen["tasks"].append, index)
            future.add_done_callback(lambda _, index=index: seen["future"].append(index))
        future.set_result(None)
        seen["queue"] = [await queue.get() for _ in range(10)]

    run_simulated(main, seed=seed)
    for order in seen.values():
        assert order == list(range(10))


def test_timers_of_one_moment_fire_in_any_order():
    async def main() -> tuple[int, ...]:
        order: list[int] = []
        loop = asyncio.get_running_loop()
        for index in range(5):
            loop.call_at(1.0, lambda index=index: order.append(index))
        await asyncio.sleep(2.0)
        return tuple(order)

    assert len({run_simulated(main, seed=seed) for seed in SEEDS}) > 4


# -- anyio


@pytest.mark.parametrize("seed", SEEDS)
def test_anyio_runs_unmodified(seed):
    async def main() -> None:
        send, receive = anyio.create_memory_object_stream[int](2)
        got: list[int] = []

        async def produce() -> None:
            async with send:
                for index in range(10):
                    await anyio.sleep(0.5)
                    await send.send(index)

        async def consume() -> None:
            async with receive:
                got.extend([item async for item in receive])

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(produce)
                group.start_soon(consume)
        assert got == list(range(10))
        assert anyio.current_time() == now() == 5.0

        with anyio.move_on_after(3) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert now() == 8.0
        with pytest.raises(TimeoutError):
            with anyio.fail_after(1):
                await anyio.sleep(2)

    run_simulated(main, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cancelled_anyio_scope_waits_for_what_is_shielded_in_it(seed):
    async def main() -> float:
        async def shielded() -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)

        async def stubborn() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                # anyio goes on delivering the cancellation in every round until this ends.
                waiting = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_later(2, waiting.set_result, None)
                while not waiting.done():
                    try:
                        await asyncio.shield(waiting)
                    except asyncio.CancelledError:
                        continue

        async with anyio.create_task_group() as group:
            group.start_soon(shielded)
            group.start_soon(stubborn)
            await anyio.sleep(1)
            group.cancel_scope.cancel()
        return now()

    assert run_simulated(main, seed=seed) == 3.0


# -- threads


@pytest.mark.parametrize("seed", SEEDS)
def test_work_for_threads_is_done_in_threads_and_waited_for(seed):
    async def main() -> list[object]:
        loop_thread = threading.current_thread()
        events: list[object] = []

        def work(name: str) -> str:
            time.sleep(0.002)
            assert threading.current_thread() is not loop_thread
            events.append(name)
            return name

        async def tick() -> None:
            await asyncio.sleep(1)
            events.append("timer")

        async with asyncio.TaskGroup() as group:
            group.create_task(tick())
            group.create_task(asyncio.to_thread(work, "asyncio"))
            group.create_task(anyio.to_thread.run_sync(work, "anyio"))
        with pytest.raises(KeyError):
            await asyncio.to_thread({}.__getitem__, "missing")
        return events

    first = run_simulated(main, seed=seed)
    assert first[-1] == "timer"
    assert run_simulated(main, seed=seed) == first


def test_a_thread_may_call_the_loop_and_wait_for_it():
    async def main() -> float:
        async def sleep() -> float:
            await anyio.sleep(3)
            return now()

        return await anyio.to_thread.run_sync(anyio.from_thread.run, sleep)

    assert run_simulated(main) == 3.0


def test_a_thread_that_waits_for_a_timer_of_the_loop_doesnt_stop_the_clock():
    async def main() -> float:
        event = threading.Event()
        asyncio.get_running_loop().call_later(5.0, event.set)
        assert await asyncio.to_thread(event.wait, LIMIT_SECONDS)
        return now()

    assert run_simulated(main) == 5.0


# -- ends


def test_a_program_that_waits_for_nothing_is_told_where():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"1 tasks aren't done:\n .*test_sim_loop.py") as caught:
        run_simulated(main, seed=5)
    (note,) = caught.value.__notes__
    assert note.startswith("to repeat it: run_simulated(test_a_program_that_waits")
    assert note.endswith(", seed=5)")


def test_a_program_that_never_ends_is_stopped():
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    with pytest.raises(SimulationError, match=r"not done after 500 rounds, at 0\.25 s"):
        run_simulated(main, max_rounds=500)


def test_what_the_program_raises_comes_out_with_a_note_of_the_seed():
    async def main() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        run_simulated(main, seed=3)
    assert "seed=3" in caught.value.__notes__[0]


def test_an_error_that_nobody_handles_fails_the_run():
    async def in_a_callback() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    async def fail() -> None:
        raise KeyError("mine")

    async def in_a_task() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task
        await asyncio.sleep(1)

    with pytest.raises(SimulationError, match="ZeroDivisionError"):
        run_simulated(in_a_callback)
    with pytest.raises(SimulationError, match=r"never retrieved.*KeyError"):
        run_simulated(in_a_task)


def test_tasks_that_are_left_are_cancelled_as_by_asyncio_run():
    ended = []

    async def forever() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(now())

    async def main() -> None:
        main.kept = asyncio.create_task(forever())
        await asyncio.sleep(1)

    run_simulated(main)
    assert ended == [1.0]


def test_there_is_no_network():
    async def main() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises(NotImplementedError):
        run_simulated(main)
