"""check_invariants finds what is planted in an engine's state, and nothing in one that is well."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from aioserve import Engine, EngineClosedError, FinishReason, InvariantError, SchedulingPolicy
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.requests import RequestState
from aioserve.testing import (
    FakeModel,
    StreamChecker,
    check_invariants,
    count_leaked_pages,
    run_simulated,
    scribble_free_pages,
)
from tests.faults.harness import params, until

STEP_SECONDS = 0.01


def model() -> FakeModel:
    return FakeModel(step_seconds=lambda plan: STEP_SECONDS)


async def busy_engine(then: Callable[[Engine, EngineLifecycle], None], **options) -> None:
    """Call `then` while one request decodes, one is paused and one waits."""
    options = {"max_num_seqs": 2, "max_buffered_tokens": 4, "policy": SchedulingPolicy(), **options}
    async with Engine(model(), **options) as engine:
        slow = engine.stream([1, 2, 3], params(100), request_id="slow")
        checker = StreamChecker(engine)
        reads = [asyncio.create_task(checker.read([index] * 20, params(60))) for index in range(2)]
        await until(
            lambda: (
                engine._lifecycle.is_started
                and any(s["paused"] for s in engine.dump()["sequences"])
            )
        )
        check_invariants(engine)
        try:
            then(engine, engine._lifecycle)
        finally:
            slow.close()
            for read in reads:
                read.cancel()
            await asyncio.wait(reads)


def test_an_engine_that_is_well_passes_at_every_moment():
    async def main() -> None:
        async with Engine(model(), policy=SchedulingPolicy(), num_host_pages=8) as engine:
            checker = StreamChecker(engine)
            reads = [
                asyncio.create_task(checker.read([index // 2] * 30, params(40, n=2)))
                for index in range(6)
            ]
            while not all(read.done() for read in reads):
                check_invariants(engine)
                scribble_free_pages(engine)
                await asyncio.sleep(STEP_SECONDS / 3)
            await engine.drain()
            check_invariants(engine)
            assert engine.stats().pages_cached
            assert count_leaked_pages(engine) == 0
        check_invariants(engine)
        checker.check()

    for seed in range(4):
        run_simulated(main, seed=seed)


def test_pins_are_held_for_as_long_as_the_engine_is_open():
    class Pins(SchedulingPolicy):
        def pin(self, request):
            return request.computed_tokens

    async def main() -> None:
        async with Engine(model(), policy=Pins(), page_size=4) as engine:
            await engine.generate([1] * 20, params(9))
            await engine.drain()
            check_invariants(engine)
            assert engine.stats().pages_held_by_requests == 28 // 4
            assert count_leaked_pages(engine) == 0
        async with Engine(model(), policy=Pins(), page_size=4) as engine:
            await engine.generate([1] * 20, params(9))
        check_invariants(engine)
        assert engine.stats().pages_held_by_requests == 0

    run_simulated(main)


def test_an_engine_that_was_never_entered_has_no_state():
    with pytest.raises(EngineClosedError, match="never entered"):
        check_invariants(Engine(model()))


def leak_a_page(live: EngineLifecycle) -> None:
    live.scheduler.memory.pool.acquire(1)


def name_a_page_twice(live: EngineLifecycle) -> None:
    lease = live.scheduler.state.running[0].lease
    lease.page_table.append(lease.page_ids[:1])


def launch_a_step_unnoticed(live: EngineLifecycle) -> None:
    live.scheduler.state.launched += 2


def lose_a_sequence(live: EngineLifecycle) -> None:
    samples = live.core.table.samples
    del samples[next(iter(samples))]


def lose_a_token(live: EngineLifecycle) -> None:
    next(iter(live.core.table.samples.values())).num_delivered += 1


def forget_to_pause(live: EngineLifecycle) -> None:
    for sequence in live.scheduler.state.sequences.values():
        sequence.paused = False


def forget_the_stall_timer(live: EngineLifecycle) -> None:
    for request in live.core.table:
        if request.stall_timer is not None:
            request.stall_timer.cancel()


def keep_a_request_id(live: EngineLifecycle) -> None:
    live.core.table._by_id["gone"] = live.core.table._by_id.pop("slow")


def compute_an_ended_request(live: EngineLifecycle) -> None:
    next(iter(live.core.table)).mailbox.finish_reason = FinishReason.ABORT


def count_a_request_twice(live: EngineLifecycle) -> None:
    live.core.table._counts[RequestState.RUNNING] += 1


def say_idle(live: EngineLifecycle) -> None:
    live.core._idle.set()


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (leak_a_page, "page [0-9]+ has 1 references"),
        (name_a_page_twice, "page [0-9]+ has [12] references"),
        (launch_a_step_unnoticed, r"are in flight; the last one launched is"),
        (lose_a_sequence, "the scheduler knows sequences"),
        (lose_a_token, r"generated tokens, [0-9]+ were delivered"),
        (forget_to_pause, "is paused: False, its mailbox isn't so"),
        (forget_the_stall_timer, "request 'slow' is paused: True, and its stall timer"),
        (keep_a_request_id, "is running, and its id is taken: False"),
        (compute_an_ended_request, "is running, and its mailbox ended: abort"),
        (count_a_request_twice, "requests are running, the table counts"),
        (say_idle, "says that it is idle"),
    ],
)
def test_what_is_planted_in_the_state_is_named(plant, message):
    found = []

    def check(engine: Engine, live: EngineLifecycle) -> None:
        plant(live)
        try:
            check_invariants(engine)
        except InvariantError as error:
            found.append(str(error))

    # The engine is broken now, and how it ends is of no interest.
    with suppress(Exception):
        run_simulated(lambda: busy_engine(check))
    assert len(found) == 1
    assert re.search(message, found[0])


def test_pages_left_behind_are_counted():
    def check(engine: Engine, live: EngineLifecycle) -> None:
        assert count_leaked_pages(engine) == live.scheduler.memory.pool.num_held > 0

    run_simulated(lambda: busy_engine(check))


def test_scribbling_leaves_what_is_still_to_be_read_and_spoils_the_rest():
    def check(engine: Engine, live: EngineLifecycle) -> None:
        pool = live.scheduler.memory.pool
        kv = live.model.runner.device._kv  # pyright: ignore
        before = kv.copy()
        kv[:] = np.where(kv > 2**63, np.uint64(0), kv)
        scribble_free_pages(engine)
        held = pool.ref_counts() > 0
        assert (kv[held] < 2**63).all()
        assert (kv[~held] > 2**63).any()
        kv[:] = before

    run_simulated(lambda: busy_engine(check))
