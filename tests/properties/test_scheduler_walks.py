"""Long random walks over the scheduler: denser than hypothesis's draws, and not shrunk.

Each seed is one walk; `walk(seed)` repeats it.
"""

from __future__ import annotations

import logging
import random

import pytest

from tests.properties.test_scheduler import LONG_PROMPTS, MAX_LENGTH, SchedulerMachine

WALKS = 400
EVENTS = 120


def walk(seed: int) -> None:
    choose = random.Random(seed)
    machine = SchedulerMachine()
    machine.start(
        page_size=choose.choice([1, 2, 16, 64]),
        spare_pages=choose.randint(0, 12),
        host_pages=choose.choice([0, 3, 40]),
        max_num_seqs=choose.randint(1, 5),
        budget=choose.choice([1, 3, 16, 64]),
        reserve=choose.choice([0, 8, 64]),
        prefix_caching=choose.random() < 0.7,
        partial_page_reuse=choose.random() < 0.5,
        eviction=choose.choice(["lru", "lfu", "fifo", "slru"]),
        recompute=choose.random() < 0.3,
        whim=choose.choice([None, choose.randint(0, 9999)]),
        scored=choose.randint(1, 20),
        groups=choose.choice([0, 0, 1, 2]),
        window=choose.randint(1, 20),
        draft_choice=choose.randint(0, 9999),
    )
    for _ in range(choose.randint(3, EVENTS)):
        _step(machine, choose)
        machine.state_is_consistent()
    machine.teardown()


def _step(machine: SchedulerMachine, choose: random.Random) -> None:
    scheduler, live = machine.scheduler, machine.live()
    event = choose.choices(
        [
            "submit",
            "advance",
            "launch",
            "complete",
            "fail",
            "bad numbers",
            "cancel",
            "pause",
            "preempt",
        ],
        [25, 40, 7, 8, 4, 3, 4, 4, 5],
    )[0]
    match event:
        case "submit":
            machine.submit(
                prompt=[
                    *choose.choice(LONG_PROMPTS)[: choose.randint(0, MAX_LENGTH - 4)],
                    *choose.choices([0, 1, 2], k=choose.randint(1, 3)),
                ],
                max_tokens=choose.randint(1, choose.choice([3, 40])),
                n=choose.choice([1, 1, 2, 3]),
                tenant=choose.choice([b"", b"", b"x"]),
                logprobs=choose.random() < 0.3,
                score_from=choose.choice([None, None, choose.randint(1, MAX_LENGTH)]),
                guided=choose.random() < 0.3,
                drafts=choose.choice([0, 1, 5]),
            )
        case "advance":
            for _ in range(choose.randint(1, 6)):
                machine.advance()
                machine.state_is_consistent()
        case "launch" if len(machine.in_flight) < 2:
            machine.launch()
        case "complete" if machine.in_flight:
            machine.complete()
        case "fail" if machine.in_flight:
            machine.fail(done=choose.randint(0, 9))
        case "bad numbers" if machine.in_flight:
            machine.produce_bad_numbers(choice=choose.randint(0, 9))
        case "cancel" if live:
            machine.leave(choose.choice(live))
        case "pause" if live:
            choose.choice([scheduler.pause, scheduler.resume])(choose.choice(live))
        case "preempt" if scheduler.state.running:
            scheduler.state.preempt(
                choose.choice(scheduler.state.running), scheduler.state.launched + 1
            )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, WALKS, WALKS // 8))
def test_random_walks_keep_the_state_and_the_tokens(first, caplog):
    caplog.set_level(logging.CRITICAL)
    for seed in range(first, first + WALKS // 8):
        try:
            walk(seed)
        except Exception as error:
            error.add_note(f"repeat with walk({seed})")
            raise
