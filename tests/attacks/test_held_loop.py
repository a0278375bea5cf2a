"""Holds of the event loop are found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.attacks import held_loop
from tests.attacks.held_loop import assert_loop_is_free, watched_loop

pytestmark = pytest.mark.more


@pytest.fixture(autouse=True)
def by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_loop, "clock_counts", lambda: True)


def compute() -> None:
    ends = time.thread_time() + 0.15
    while time.thread_time() < ends:
        pass


@pytest.mark.parametrize("hold", [compute, lambda: time.sleep(1.2)], ids=["computing", "waiting"])
@pytest.mark.asyncio
async def test_a_callback_that_takes_long_holds_the_loop(hold: Callable[[], None]) -> None:
    async with watched_loop() as held:
        hold()
    assert held.seconds > 0.1


@pytest.mark.asyncio
async def test_a_thread_that_keeps_the_lock_holds_the_loop() -> None:
    async def attack() -> None:
        # One call in C, which nothing interrupts.
        await asyncio.to_thread(pow, 3, 2**22)

    with pytest.raises(AssertionError, match="the loop was held"):
        await assert_loop_is_free(attack)


@pytest.mark.asyncio
async def test_what_is_awaited_does_not_hold_the_loop() -> None:
    await assert_loop_is_free(lambda: asyncio.sleep(0.2))


@pytest.mark.asyncio
async def test_where_no_clock_counts_the_attack_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_loop, "clock_counts", lambda: False)
    attacks: list[None] = []

    async def attack() -> None:
        attacks.append(time.sleep(1.2))

    await assert_loop_is_free(attack)
    assert len(attacks) == 1
