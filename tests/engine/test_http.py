"""A block ends when the client of its request leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aioserve import Engine, SamplingParams
from aioserve.http import until_disconnected
from aioserve.testing import FakeModel, run_simulated

PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


class Client:
    """A request of a client that leaves after some seconds; None means that it stays."""

    def __init__(self, leaves_seconds: float | None) -> None:
        self._leaves_seconds = leaves_seconds
        self._first = [{"type": "http.request", "body": b"", "more_body": False}]
        self.is_read = False

    async def receive(self) -> dict[str, Any]:
        if self._first:
            return self._first.pop()
        self.is_read = True
        try:
            await asyncio.sleep(1e6 if self._leaves_seconds is None else self._leaves_seconds)
        finally:
            self.is_read = False
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("is_request", [True, False], ids=["request", "receive"])
def test_a_client_that_leaves_cancels_the_block_and_frees_the_request(is_request: bool) -> None:
    async def main() -> None:
        client = Client(0.05)
        async with Engine(
            FakeModel(step_seconds=lambda plan: 0.01), prefix_caching=False
        ) as engine:
            request: Any = client if is_request else client.receive
            async with until_disconnected(request):
                await engine.generate([1, 2], PARAMS)
                raise AssertionError("the block went on")
            await asyncio.sleep(0.1)
            stats = engine.stats()
            assert stats.num_running == 0
            assert stats.pages_free == stats.pages_total
            assert 0 < stats.tokens_generated_total < 60

    run_simulated(main)


def test_a_client_that_stays_has_its_answer_and_is_watched_no_more() -> None:
    async def main() -> None:
        client = Client(None)
        async with Engine(FakeModel()) as engine:
            async with until_disconnected(client):
                completion = await engine.generate([1, 2], PARAMS)
            assert len(completion.token_ids) == 60
        await asyncio.sleep(0)
        assert not client.is_read

    run_simulated(main)


def test_what_the_block_raises_passes_through() -> None:
    async def main() -> None:
        async with until_disconnected(Client(None)):
            await asyncio.sleep(0.01)
            raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake"):
        run_simulated(main)


def test_a_task_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def main() -> None:
        behind = []

        async def route() -> None:
            async with until_disconnected(Client(None)):
                await asyncio.sleep(1e6)
            behind.append(True)

        task = asyncio.create_task(route())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not behind

    run_simulated(main)


@pytest.mark.parametrize("request_", [None, "GET /", SimpleNamespace(receive=3)], ids=repr)
def test_another_kind_of_request_is_named(request_: Any) -> None:
    with pytest.raises(TypeError, match=r"request must have ASGI's receive, or be it, got \w+"):
        until_disconnected(request_)
