"""A wait ends with what comes, or names what never does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import waits
from tests.waits import block_until, until

answers = pytest.mark.parametrize("comes", [7, "seven", [None]])


def asked(said: Iterator[Any]) -> Callable[[], Any]:
    return lambda: next(said)


@answers
def test_whoever_blocks_has_the_first_answer_that_is_true(comes: object) -> None:
    assert block_until(asked(iter([None, 0, False, [], comes, "more"]))) is comes


@answers
@pytest.mark.asyncio
async def test_whoever_awaits_has_the_first_answer_that_is_true(comes: object) -> None:
    assert await until(asked(iter([None, 0, False, [], comes, "more"]))) is comes
    answer = asked(iter([None, comes]))

    async def asked_at_length() -> Any:
        await asyncio.sleep(0)
        return answer()

    assert await until(asked_at_length) is comes


@pytest.mark.asyncio
async def test_the_loop_goes_on_while_somebody_awaits() -> None:
    heard: list[int] = []
    asyncio.get_running_loop().call_soon(heard.append, 7)
    assert await until(lambda: heard) == [7]


@pytest.mark.asyncio
async def test_what_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LIMIT_SECONDS", 0.05)
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: the kettle is cold"):
        block_until(lambda: False, told=lambda: "the kettle is cold")
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: the kettle is cold"):
        await until(lambda: False, told=lambda: "the kettle is cold")
