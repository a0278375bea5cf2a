"""Draining loses nothing: each answer in progress gets exactly one end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Engine
from aioserve.errors import ConfigError
from aioserve.server import create_app, drain
from aioserve.testing import FakeModel
from tests.server.serving import client_of
from tests.tiers import examples
from tests.waits import LIMIT_SECONDS, until


class ClientCall:
    """One call, and its end."""

    def __init__(self, client: httpx.AsyncClient, tokens: int, stream: bool) -> None:
        self.stream = stream
        body = {
            "model": "fake",
            "prompt": [1, 2, 3],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        self._task = asyncio.create_task(client.post("/v1/completions", json=body))

    async def end(self) -> str:
        """End of the call: "whole", "ended" by the deadline of the drain, or "refused" if it came
        too late."""
        answer = await self._task
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "draining"
            assert int(answer.headers["retry-after"]) >= 1
            return "refused"
        assert answer.status_code == 200
        if not self.stream:
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            return "whole"
        events = [line[6:] for line in answer.text.split("\n\n") if line]
        ends = [event for event in events if event == "[DONE]" or "error" in json.loads(event)]
        assert ends == events[-1:], "a stream has one end, and nothing behind it"
        return "whole" if ends == ["[DONE]"] else "ended"


@settings(max_examples=examples(12), deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.integers(1, 60), st.booleans(), st.booleans()), min_size=1, max_size=12
    ),
    deadline=st.sampled_from([0.0, 0.01, 0.05, None]),
    wait_seconds=st.sampled_from([0.0, 0.01, 0.05]),
)
def test_each_call_has_one_end_whenever_a_drain_begins(
    calls: list[tuple[int, bool, bool]], deadline: float | None, wait_seconds: float
) -> None:
    async def run() -> None:
        model = FakeModel(step_seconds=lambda _: 0.001)
        async with Engine(model, max_num_seqs=4) as engine:
            app = create_app(engine)
            async with client_of(app) as client:
                early = [
                    ClientCall(client, tokens, stream) for tokens, stream, late in calls if not late
                ]
                await asyncio.sleep(wait_seconds)
                draining = asyncio.create_task(drain(app, deadline))
                await asyncio.sleep(0)
                late = [
                    ClientCall(client, tokens, stream) for tokens, stream, late in calls if late
                ]
                ended = await draining
                assert engine.stats().num_running == engine.stats().num_waiting == 0
                assert not app.state.app_state.calls.num_running
                ends = [await call.end() for call in early]
                assert [await call.end() for call in late] == ["refused"] * len(late)
                if deadline is None:
                    assert "ended" not in ends
                assert ended <= len(early)
                assert ends.count("ended") <= ended

    asyncio.run(run())


@pytest.mark.asyncio
async def test_what_goes_away_says_so_and_closes_its_connections() -> None:
    may_end = False
    async with Engine(FakeModel(step_seconds=lambda _: 0.0 if may_end else 0.01)) as engine:
        app = create_app(engine)
        async with client_of(app) as client:
            running = ClientCall(client, 500, stream=True)
            await until(lambda: engine.stats().num_running)
            draining = asyncio.create_task(drain(app, 2 * LIMIT_SECONDS))
            await until(lambda: engine.state == "draining")
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "not_ready")
            assert (await client.get("/health")).status_code == 200
            for method in ("GET", "DELETE"):  # stored responses, which need no engine
                stored = await client.request(method, "/v1/responses/resp_1")
                assert stored.status_code == 404
            body: dict[str, Any] = {"model": "fake", "prompt": [1]}
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert not draining.done()
            may_end = True
            assert await draining == 0
            assert await running.end() == "whole"


@pytest.mark.asyncio
async def test_a_deadline_that_is_none_changes_nothing() -> None:
    async with Engine(FakeModel()) as engine:
        with pytest.raises(ConfigError, match="deadline_seconds"):
            await drain(create_app(engine), -1)
        assert engine.state == "open"
