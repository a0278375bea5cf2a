"""`/live`, `/live/now` and `/trace`, over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from aioserve import Engine, RequestInfo, SamplingParams
from aioserve.server import ServerSettings, create_app
from aioserve.server.app_state import AppState, Call
from aioserve.server.call_log import CallLog
from aioserve.server.step_log.endpoints import MAX_SENT_PARTS, Numbers, Reader
from aioserve.server.step_log.recorder import StepRecorder
from aioserve.testing import FakeModel
from tests.server.serving import client_of, served
from tests.server.test_steps import step
from tests.waits import until

ANSWER = SamplingParams(max_tokens=20, ignore_eos=True)


def arrival(request_id: str, tenant: str | None = None) -> RequestInfo:
    return RequestInfo(
        request_id=request_id,
        tenant=tenant,
        prompt_tokens=1,
        max_tokens=1,
        num_samples=1,
        arrival_seconds=0.5,
    )


async def updates(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.asyncio
async def test_the_live_view_tells_what_a_request_did() -> None:
    async with served(num_pages=256) as (engine, client), client.stream("GET", "/live") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        told = updates(response)
        first = await anext(told)
        assert first["about"]["models"] == ["pyhelp"]
        assert (first["about"]["pages_total"], first["open"], first["log"]) == (256, [], [])
        await engine.generate("import os\n", ANSWER, request_id="mine")
        log: list[Any] = []
        while not any(entry[0] == "ended" for entry in log):
            update = await anext(told)
            assert "about" not in update
            assert "open" not in update
            assert update["numbers"].keys() == set(Numbers.__struct_fields__)
            log += update["log"]
        numbers, stats = update["numbers"], engine.stats()
        assert numbers["requests_finished_total"] == stats.requests_finished_total
        assert numbers["decode"]["tokens_total"] == stats.decode.tokens_total > 0
    arrived, *steps, ended = log
    assert arrived[:3] == ["arrived", 1, "mine"]
    assert {entry[0] for entry in steps} == {"step"}
    assert ended[:3] == ["ended", 1, "length"]
    parts = [part for entry in steps for part in entry[12]]
    assert [part[4] for part in parts] == [1] * 20
    assert [part[5] for part in parts] == [False] + [True] * 19
    for entry in steps:
        assert sum(entry[7:11]) == 256


@pytest.mark.asyncio
async def test_who_comes_later_is_told_of_those_that_are_open() -> None:
    async with served(num_pages=256) as (engine, client):
        stream = engine.stream("x", SamplingParams(max_tokens=900, ignore_eos=True))
        await stream.started()
        now = (await client.get("/live/now")).json()
        ((arrived, began),) = now["open"]
        stream.close()
    assert arrived[:2] == ["arrived", 1]
    assert arrived[7] <= began <= now["now_seconds"]
    assert now["about"]["has_chat_template"]


@pytest.mark.asyncio
async def test_as_many_look_as_may_and_who_leaves_makes_room() -> None:
    async with served(ServerSettings(max_live_readers=2), num_pages=256) as (_, client):
        async with client.stream("GET", "/live") as one, client.stream("GET", "/live") as other:
            await anext(updates(one))
            await anext(updates(other))
            refused = await client.get("/live")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_readers"
            assert refused.headers["retry-after"]

        async def is_let_in() -> bool:
            async with client.stream("GET", "/live") as response:
                return response.status_code == 200

        await until(is_let_in)


@pytest.mark.asyncio
async def test_the_live_view_ends_with_the_engine() -> None:
    async with served(num_pages=256) as (engine, client), client.stream("GET", "/live") as response:
        told = updates(response)
        await anext(told)
        await engine.drain()
        states = [update["state"] async for update in told]
    assert states[-1] == "draining"


async def reader_of(tenant: str | None, steps: StepRecorder, engine: Engine) -> Reader:
    call = Call(AppState(engine, ServerSettings(), steps), CallLog(tenant=tenant))
    return Reader(call, steps)


@pytest.mark.asyncio
async def test_a_slow_reader_loses_entries_and_is_told_all_it_must_know() -> None:
    steps = StepRecorder(max_entries=10)
    async with Engine(FakeModel()) as engine:
        reader = await reader_of(None, steps, engine)
        reader.update(0.0)
        steps.arrived([arrival("a")])
        for number in range(5):
            steps.step_finished(step(number, number + 1.0))
        update = reader.update(5.0)
        assert (update.num_lost, len(update.log), update.open) == (0, 6, None)
        for number in range(30):
            steps.step_finished(step(number, number + 6.0))
        update = reader.update(36.0)
        assert (update.num_lost, len(update.log)) == (20, 10)
        assert update.open is not None
        assert [known.arrived.request_id for known in update.open] == ["a"]
        assert not reader.has_news


@pytest.mark.asyncio
async def test_no_update_is_longer_than_its_limit() -> None:
    steps = StepRecorder()
    async with Engine(FakeModel()) as engine:
        reader = await reader_of(None, steps, engine)
        steps.arrived([arrival("a")])
        parts = [("a", sample, 5, 1, 1, True) for sample in range(250)]
        for number in range(200):
            steps.step_finished(step(number, number + 1.0, parts))
        update = reader.update(200.0)
    assert len(update.log) == MAX_SENT_PARTS // 250


@pytest.mark.asyncio
async def test_requests_of_other_tenants_have_no_names() -> None:
    steps = StepRecorder()
    async with Engine(FakeModel()) as engine:
        for tenant in ("one", "two"):
            steps.arrived([arrival(tenant, tenant)])
        for tenant, names in (("one", ["one", ""]), ("two", ["", "two"]), (None, ["one", "two"])):
            update = (await reader_of(tenant, steps, engine)).update(1.0)
            assert update.open is not None
            assert [entry.request_id for entry in update.log] == names  # pyright: ignore[reportAttributeAccessIssue]
            assert [known.arrived.request_id for known in update.open] == names


@pytest.mark.asyncio
async def test_a_trace_can_be_downloaded() -> None:
    async with served(num_pages=256) as (engine, client):
        await asyncio.gather(*[engine.generate("import os\n", ANSWER) for _ in range(4)])
        await until(lambda: not engine.stats().num_running)
        response = await client.get("/trace")
    assert response.headers["content-type"] == "application/json"
    assert "attachment" in response.headers["content-disposition"]
    events = response.json()
    assert sum(event["ph"] == "B" for event in events) == 4
    assert sum(event["ph"] == "E" for event in events) == 4
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        "tokens",
        "pages",
        "requests",
    }


@pytest.mark.asyncio
async def test_without_a_page_nothing_of_it_is_there() -> None:
    async with Engine(num_pages=256) as engine:
        app = create_app(engine, ServerSettings(page=False))
        assert "StepRecorder" not in engine.dump()["observers"]
        async with client_of(app) as client:
            for path in ("/", "/page/page.css", "/live", "/live/now", "/trace"):
                assert (await client.get(path)).status_code == 404
            assert (await client.get("/v1/models")).status_code == 200
