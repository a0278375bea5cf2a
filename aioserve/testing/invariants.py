"""Check of an engine's consistency: for tests, between any two steps of the program.

async with Engine(FakeModel(), policy=MyPolicy()) as engine:
    ...
    check_invariants(engine)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aioserve.engine.core import IN_CORE, CoreLoop
from aioserve.engine.engine import Engine
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.report import stats_of
from aioserve.engine.requests import LiveRequest, RequestState, RequestTable
from aioserve.errors import EngineClosedError, InvariantError
from aioserve.scheduling.scheduler import Scheduler
from aioserve.testing.fake_model import FakeRunner

__all__ = ["check_invariants", "count_leaked_pages", "scribble_free_pages"]


def check_invariants(engine: Engine) -> None:
    """Raise `InvariantError` naming every inconsistency of an engine's state.

    Pages: each is free, fenced or held, and held exactly by the page tables, swapped requests and
    the prefix tree that name it. Steps: those in flight are the last ones launched. Requests: the
    core loop, the scheduler and the mailboxes know the same ones, with the same tokens, and paused
    ones have a stall timer. An engine without requests holds only prefixes that are cached or
    pinned.

    Raises `EngineClosedError` for an engine that was never entered. Call it on the engine's event
    loop. It costs time in proportion to the pages and requests.
    """
    live = _live(engine)
    live.scheduler.sanity_check()
    problems = [*_steps(live.core, live.scheduler), *_stats(live)]
    # A core loop that failed has ended its requests without the scheduler.
    if live.core.failure is None:
        problems += [*_requests(live.core, live.scheduler), *_idle(live)]
    if problems:
        raise InvariantError("; ".join(problems))


def scribble_free_pages(engine: Engine) -> None:
    """Fill the pages of a `FakeModel` that nobody may read with junk.

    Reading one of them later changes tokens. May be called at any moment on the engine's event
    loop.
    """
    live = _live(engine)
    runner = live.model.runner
    if not isinstance(runner, FakeRunner):
        raise TypeError(f"only the pages of a FakeModel can be scribbled on, got {runner!r}")
    memory = live.scheduler.memory
    free = [tier.pool.ref_counts() == 0 for tier in memory.tiers]
    copies = list(memory.copies)  # those of the next plan
    copies += runner.copies_in_flight
    for page_ids in runner.pages_in_flight:
        free[0][page_ids] = False
    for copy in copies:
        free[copy.from_tier][copy.source] = False
        free[copy.to_tier][copy.target] = False
    runner.device.scribble(*[np.flatnonzero(pages) for pages in free])


def count_leaked_pages(engine: Engine) -> int:
    """Return the number of pages, of all tiers, that stay held without requests and prefix tree.

    Only for an engine that is closed or has been drained. Clears the prefix tree.
    """
    scheduler = _live(engine).scheduler
    scheduler.end_pins()
    memory = scheduler.memory
    if memory.tree is not None:
        memory.tree.clear()
    return sum([tier.pool.num_held for tier in memory.tiers])


def _live(engine: Engine) -> EngineLifecycle:
    if not engine._lifecycle.is_started:
        raise EngineClosedError(
            "this engine was never entered: there is nothing to check", state="new"
        )
    return engine._lifecycle


def _steps(core: CoreLoop, scheduler: Scheduler) -> Iterator[str]:
    pool, pipeline = scheduler.memory.pool, core.pipeline
    launched, done = scheduler.state.launched, pool.done_step
    steps = [plan.step for plan in pipeline.in_flight]
    if steps != list(range(launched + 1 - len(steps), launched + 1)):
        yield f"steps {steps} are in flight; the last one launched is {launched}"
    if not len(steps) == launched - done <= pipeline.depth:
        yield f"step {launched} is launched and {done} done, with {len(steps)} known in flight"
    if launched == done and pool.num_fenced:
        yield f"{pool.num_fenced} pages are fenced although no step is in flight"


def _stats(live: EngineLifecycle) -> Iterator[str]:
    stats = stats_of(live)
    parts = (
        stats.pages_free,
        stats.pages_fenced,
        stats.pages_cached,
        stats.pages_held_by_requests,
    )
    if sum(parts) != stats.pages_total or min(parts) < 0:
        yield f"free, fenced, cached and held pages are {parts}, {stats.pages_total} in all"


def _requests(core: CoreLoop, scheduler: Scheduler) -> Iterator[str]:
    table, sequences = core.table, scheduler.state.sequences
    if sequences.keys() != table.samples.keys():
        yield (
            f"the scheduler knows sequences {sorted(sequences)}, "
            f"the table of requests {sorted(table.samples)}"
        )
    requests = list(table)
    for sequence_id, sample in table.samples.items():
        mailbox = sample.request.mailbox
        if sample not in sample.request.samples or sample.request not in requests:
            yield f"sequence {sequence_id} belongs to no request in the table"
        sequence = sequences.get(sequence_id)
        if sequence is None:
            continue
        generated = sequence.num_known - sequence.prompt_tokens
        if generated != sample.num_delivered:
            yield (
                f"sequence {sequence_id} has {generated} generated tokens, "
                f"{sample.num_delivered} were delivered"
            )
        if mailbox.finish_reason is None and sequence.paused != mailbox.paused:
            yield f"sequence {sequence_id} is paused: {sequence.paused}, its mailbox isn't so"
    for request in requests:
        yield from _request(table, request)
    for state in RequestState:
        count = sum(request.state is state for request in requests)
        if state is not RequestState.ENDED and count != table.count(state):
            yield f"{count} requests are {state.value}, the table counts {table.count(state)}"


def _request(table: RequestTable, request: LiveRequest) -> Iterator[str]:
    mailbox, state = request.mailbox, request.state
    name = f"request {mailbox.request_id!r}"
    if (mailbox.finish_reason is None) != (state is not RequestState.LEAVING):
        yield f"{name} is {state.value}, and its mailbox ended: {mailbox.finish_reason}"
    if state is not RequestState.LEAVING and not table.is_taken(mailbox.request_id):
        yield f"{name} is {state.value}, and its id is taken: False"
    if state is not RequestState.RUNNING:
        return
    if not request.samples:
        yield f"{name} runs and has no samples"
    waiting = len(mailbox._tokens)
    if mailbox.paused != (waiting >= mailbox.capacity) and not (
        mailbox.paused and 2 * waiting > mailbox.capacity
    ):
        yield f"{name} is paused: {mailbox.paused}, with {waiting} of {mailbox.capacity} tokens"
    timer = request.stall_timer
    if mailbox.paused != (timer is not None and not timer.cancelled()):
        yield f"{name} is paused: {mailbox.paused}, and its stall timer is {timer!r}"
    delivered = sum(sample.num_delivered for sample in request.samples)
    if delivered > mailbox.completion_tokens:
        yield f"{name} was delivered {delivered} tokens and has {mailbox.completion_tokens}"


def _idle(live: EngineLifecycle) -> Iterator[str]:
    core, scheduler = live.core, live.scheduler
    busy = bool(core.table.count(*IN_CORE) or core.pipeline.in_flight)
    if core.is_idle and busy:
        yield "the core loop says that it is idle, and has requests or steps in flight"
    if not busy and (scheduler.num_waiting or scheduler.num_running):
        yield f"{scheduler.num_waiting} sequences wait and {scheduler.num_running} run for nobody"
    held = stats_of(live).pages_held_by_requests
    pinned = scheduler.state.pins.num_pages
    if not busy and held > pinned:
        yield f"{held} pages are held, {pinned} of them by pins, and there is no request"
