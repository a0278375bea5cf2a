"""Unknown paths, and methods that a path doesn't have, are errors in the API's format."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from aioserve.testing import FakeModel
from tests.server.serving import client_of


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/no/such", 404, "not_found"),
        ("POST", "//v1/models", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/%ff%00models", 404, "not_found"),
        ("GET", "/" + "x" * 9000, 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_there_is_told_as_other_errors_are(
    method: str, path: str, status: int, code: str
) -> None:
    async with Engine(FakeModel()) as engine, client_of(create_app(engine)) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == code
    assert len(answer.content) < 1000
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.asyncio
async def test_allow_names_all_methods_of_a_path() -> None:
    async with Engine(FakeModel()) as engine, client_of(create_app(engine)) as client:
        answer = await client.post("/v1/responses/resp_1", json={})
        assert answer.headers["allow"] == "DELETE, GET, HEAD"
        assert "DELETE" in answer.json()["error"]["message"]
        answer = await client.put("/v1/responses", json={})
        assert answer.headers["allow"] == "POST"


@pytest.mark.asyncio
async def test_each_api_writes_them_in_its_own_way() -> None:
    async with Engine(FakeModel()) as engine, client_of(create_app(engine)) as client:
        answer = await client.get("/v1/messages")
        below = await client.post("/v1/messages/batches")
        pulled = await client.post("/api/pull")
    assert answer.status_code == 405
    assert answer.json()["type"] == "error"
    assert (below.status_code, below.json()["type"]) == (404, "error")
    assert pulled.json() == {"error": "there is nothing at '/api/pull'"}


@pytest.mark.asyncio
async def test_no_spelling_of_an_open_path_opens_another() -> None:
    settings = ServerSettings(api_keys=["some-very-secret-key"])
    paths = ("/health/../v1/models", "/health/%2e%2e/v1/models", "//v1/models", "/health/", "//")
    paths += ("/v1/models", "/%761/models", "/v1/models?/health", "/page/../live/now", "/health%00")
    async with Engine(FakeModel()) as engine:
        app = create_app(engine, settings)
        mounted = Starlette(routes=[Mount("/health", app), Mount("/api", app)])
        for outer, prefix in ((app, ""), (mounted, "/api"), (mounted, "/health")):
            async with client_of(outer) as client:
                for path in paths:
                    # httpx would resolve the dots
                    target = (prefix + path).encode()
                    answer = await client.get("/", extensions={"target": target})
                    assert answer.status_code == 401, (prefix, path)
                answer = await client.get(prefix + "/%68ealth")
                assert answer.status_code == 200
