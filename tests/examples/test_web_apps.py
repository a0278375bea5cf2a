"""Each web app answers over a real socket, and a client that goes away frees its request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, NamedTuple

import aiohttp
import pytest
import uvicorn
from aiohttp import web

from aioserve import (
    Engine,
    EngineStats,
    Refusal,
    RequestView,
    SamplingParams,
    SchedulerView,
    SchedulingPolicy,
)
from tests.waits import until

Load = Callable[[str], ModuleType]

ENDLESS = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


class Served(NamedTuple):
    url: str
    engine: Engine


@asynccontextmanager
async def under_uvicorn(module: ModuleType) -> AsyncIterator[Served]:
    config = uvicorn.Config(module.app, port=0, log_level="error", lifespan="on", ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started or serving.done())
    if serving.done():
        raise RuntimeError("the server ended before it started")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", module.app.state.engine)
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def under_aiohttp(module: ModuleType) -> AsyncIterator[Served]:
    runner = web.AppRunner(module.create_app(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield Served(f"http://127.0.0.1:{runner.addresses[0][1]}", runner.app[module.ENGINE])
    finally:
        await runner.cleanup()


async def idle_stats(engine: Engine) -> EngineStats:
    """The engine's numbers once nothing runs and every page is given back."""

    def idle() -> EngineStats | None:
        stats = engine.stats()
        busy = stats.num_running or stats.pages_held_by_requests or stats.pages_fenced
        return None if busy else stats

    return await until(idle)


APPS: list[Any] = [
    pytest.param("fastapi_app", under_uvicorn, "/ask", {"json": {"question": "X?"}}, id="fastapi"),
    pytest.param(
        "starlette_app", under_uvicorn, "/complete", {"data": b"import os\n"}, id="starlette"
    ),
    pytest.param("aiohttp_app", under_aiohttp, "/complete", {"data": b"import os\n"}, id="aiohttp"),
]
each_app = pytest.mark.parametrize(("name", "serve", "path", "request_body"), APPS)


@each_app
@pytest.mark.asyncio
async def test_a_client_that_goes_away_frees_its_request(
    load_example: Load, name: str, serve: Any, path: str, request_body: dict[str, Any]
) -> None:
    module = load_example(name)
    vars(module)["PARAMS"] = ENDLESS
    async with serve(module) as served, aiohttp.ClientSession() as session:
        response = await session.post(served.url + path, **request_body)
        assert response.status == 200
        await response.content.readany()
        assert served.engine.stats().num_running == 1
        response.close()
        stats = await idle_stats(served.engine)
        assert stats.tokens_generated_total < 400


@pytest.mark.asyncio
async def test_a_client_that_leaves_a_whole_answer_frees_its_request(load_example: Load) -> None:
    module = load_example("fastapi_app")
    body: Any = {"json": {"question": "X?"}}
    async with under_uvicorn(module) as served, aiohttp.ClientSession() as session:
        vars(module)["PARAMS"] = SamplingParams(max_tokens=8, temperature=0.0)
        async with session.post(served.url + "/ask-whole", **body) as response:
            told = await response.json()
        expected = await served.engine.generate([{"role": "user", "content": "X?"}], module.PARAMS)
        assert told == {"text": expected.text}

        vars(module)["PARAMS"] = ENDLESS
        before = served.engine.stats().tokens_generated_total
        asking = asyncio.create_task(session.post(served.url + "/ask-whole", **body))
        await until(lambda: served.engine.stats().tokens_generated_total > before)
        asking.cancel()
        stats = await idle_stats(served.engine)
        assert stats.tokens_generated_total - before < 400


@each_app
@pytest.mark.asyncio
async def test_an_answer_arrives_whole(
    load_example: Load, name: str, serve: Any, path: str, request_body: dict[str, Any]
) -> None:
    module = load_example(name)
    vars(module)["PARAMS"] = SamplingParams(max_tokens=24, temperature=0.0)
    async with serve(module) as served, aiohttp.ClientSession() as session:
        async with session.post(served.url + path, **request_body) as response:
            assert response.status == 200
            body = await response.text()
        expected = await served.engine.generate(
            [{"role": "user", "content": "X?"}] if name == "fastapi_app" else "import os\n",
            module.PARAMS,
        )
    if name == "fastapi_app":
        events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
        assert events.pop() == {"finish_reason": expected.finish_reason}
        body = "".join(event["text"] for event in events)
    assert body == expected.text


@pytest.mark.parametrize(
    ("name", "serve"), [("starlette_app", under_uvicorn), ("aiohttp_app", under_aiohttp)]
)
@pytest.mark.asyncio
async def test_a_bad_prompt_is_the_clients_fault(load_example: Load, name: str, serve: Any) -> None:
    async with serve(load_example(name)) as served, aiohttp.ClientSession() as session:
        for body in (b"", b"why? " * 10_000):
            async with session.post(served.url + "/complete", data=body) as response:
                assert response.status == 400
                assert "prompt" in await response.text()
        async with session.post(served.url + "/complete", data=b"\xff") as response:
            assert response.status == 200


@pytest.mark.parametrize("path", ["/ask", "/ask-whole"])
@pytest.mark.asyncio
async def test_what_only_encoding_shows_has_a_status(load_example: Load, path: str) -> None:
    async with (
        under_uvicorn(load_example("fastapi_app")) as served,
        aiohttp.ClientSession() as session,
        session.post(served.url + path, json={"question": "why? " * 10_000}) as response,
    ):
        assert response.status == 400
        assert "max_model_len" in (await response.json())["detail"]


class Refusing(SchedulingPolicy):
    """Lets nothing start that waited for a step."""

    def admit(self, request: RequestView, view: SchedulerView) -> Refusal:
        return Refusal("closed today")


def with_engine(module: ModuleType, **options: Any) -> ModuleType:
    """The app, whose lifespan makes an engine with these options."""
    make = module.Engine
    vars(module)["Engine"] = lambda model: make(model, **options)
    return module


@each_app
@pytest.mark.asyncio
async def test_a_refused_request_is_a_503_and_no_broken_stream(
    load_example: Load, name: str, serve: Any, path: str, request_body: dict[str, Any]
) -> None:
    module = with_engine(load_example(name), policy=Refusing())
    async with serve(module) as served, aiohttp.ClientSession() as session:
        async with session.post(served.url + path, **request_body) as response:
            assert response.status == 503
            assert "closed today" in await response.text()
        await idle_stats(served.engine)


@each_app
@pytest.mark.asyncio
async def test_a_full_queue_is_a_503_and_a_client_that_left_it_frees_its_place(
    load_example: Load, name: str, serve: Any, path: str, request_body: dict[str, Any]
) -> None:
    module = with_engine(load_example(name), max_num_seqs=1, max_waiting=1)
    vars(module)["PARAMS"] = ENDLESS
    async with serve(module) as served, aiohttp.ClientSession() as session:
        running = served.engine.stream([1, 2], ENDLESS)
        await running.started()
        waiting = asyncio.create_task(session.post(served.url + path, **request_body))
        await until(lambda: served.engine.stats().num_waiting)
        async with session.post(served.url + path, **request_body) as response:
            assert response.status == 503
            assert "max_waiting" in await response.text()
        waiting.cancel()
        await until(lambda: not served.engine.stats().num_waiting)
        running.close()
        await idle_stats(served.engine)
