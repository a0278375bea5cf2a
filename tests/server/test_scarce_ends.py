"""Share of other clients while some send no bodies, pages hold readers, or descriptors run out."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest

from aioserve import Engine
from aioserve.server import ServerSettings, create_app, descriptors
from aioserve.server.descriptors import DescriptorWatch
from aioserve.testing import FakeModel
from tests.server.serving import port_of, running
from tests.waits import LIMIT_SECONDS, until

pytestmark = pytest.mark.asyncio

MOST = 3
BODY = {"model": "fake", "prompt": [1], "max_tokens": 1}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 100\r\n\r\n"
)


async def test_bodies_that_never_come_keep_out_none_that_does() -> None:
    settings = ServerSettings(max_concurrent_calls=MOST)
    async with Engine(FakeModel()) as engine:
        app = create_app(engine, settings)
        calls = app.state.app_state.calls
        async with running(app) as server:
            port = port_of(server)
            silent: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
            for count in range(1, MOST + 1):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                silent.append((reader, writer))
                writer.write(HEAD)
                await until(lambda count=count: len(calls._reading) == count)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                for _ in range(2 * MOST):
                    answer = await client.post("/v1/completions", json=BODY, timeout=LIMIT_SECONDS)
                    assert answer.status_code == 200, answer.text
            oldest = await silent[0][0].read()
            assert oldest.startswith(b"HTTP/1.1 503")
            assert b"max_concurrent_calls" in oldest
            for _, writer in silent:
                writer.close()
            await until(lambda: not calls.num_posted)


async def test_calls_that_are_computed_are_ended_by_no_other() -> None:
    is_refused = False
    model = FakeModel(step_seconds=lambda _: 0.0 if is_refused else 0.05)
    async with Engine(model) as engine:
        app = create_app(engine, ServerSettings(max_concurrent_calls=MOST))
        calls = app.state.app_state.calls
        async with (
            running(app) as server,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port_of(server)}", timeout=LIMIT_SECONDS
            ) as client,
        ):
            long = BODY | {"max_tokens": 400, "ignore_eos": True}
            begun = [
                asyncio.create_task(client.post("/v1/completions", json=long)) for _ in range(MOST)
            ]
            await until(lambda: calls.num_posted == MOST and not calls._reading)
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            is_refused = True
            for call in begun:
                assert (await call).status_code == 200


@pytest.mark.parametrize("path", ["/live", "/live/now", "/v1/models", "/trace"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_picture_in_a_page_of_another_site_holds_no_reader(path: str, site: str) -> None:
    async with Engine(FakeModel()) as engine:
        app = create_app(engine, ServerSettings())
        async with (
            running(app) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(server)}") as client,
        ):
            for mode in ("no-cors", "navigate"):
                if mode == "navigate" and path == "/v1/models":
                    continue
                headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "origin_not_allowed"
            assert app.state.app_state.recorded_steps.num_readers == 0


async def test_links_own_pages_and_programs_are_let_in() -> None:
    async with (
        Engine(FakeModel()) as engine,
        running(create_app(engine, ServerSettings())) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(server)}") as client,
    ):
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await client.get("/", headers=link)).status_code == 200
        for site in ("same-origin", "none"):
            mine = {"sec-fetch-site": site, "sec-fetch-mode": "cors"}
            assert (await client.get("/live/now", headers=mine)).status_code == 200
        assert (await client.get("/live/now")).status_code == 200


async def test_descriptors_that_run_out_are_told_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "_limit", lambda: 64)
    watch = DescriptorWatch()
    with caplog.at_level(logging.ERROR, logger=descriptors.__name__):
        watch.taken(20, 0.0)
        assert not caplog.records
        for now in (1.0, 2.0, 60.9):
            watch.taken(60, now)
        assert len(caplog.records) == 1
        assert "64 file descriptors" in caplog.text
        watch.taken(63, 61.0)
        assert len(caplog.records) == 2
    monkeypatch.setattr(descriptors, "_limit", lambda: None)
    watch.taken(10_000, 500.0)
    assert len(caplog.records) == 2


async def test_a_servers_connections_are_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "_limit", lambda: 8)
    async with (
        Engine(FakeModel()) as engine,
        running(create_app(engine)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(server)}") as client,
    ):
        answer = await client.post("/v1/completions", content=json.dumps(BODY))
        assert answer.status_code == 415
    assert "new connections are dropped" in caplog.text
