"""Checks that a request must pass before a route, at each limit and one past it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine
from aioserve.errors import ConfigError
from aioserve.server import ServerSettings, create_app
from aioserve.server.call_log import CallLog
from aioserve.server.errors import ApiError
from aioserve.server.request_checks import (
    MAX_REQUEST_ID_CHARS,
    Arrival,
    HeaderCheck,
    HostCheck,
    OriginCheck,
    Preflight,
    QueryCheck,
    given_request_id,
)
from tests.server.serving import client_of, listening, served
from tests.waits import LIMIT_SECONDS, until

BODY: dict[str, Any] = {"model": "pyhelp", "prompt": "json.dumps", "max_tokens": 2}


def arrived(query: bytes = b"", /, method: str = "GET", path: str = "/", **headers: str) -> Arrival:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": method, "path": path, "headers": named, "query_string": query}
    return Arrival(scope, CallLog())


def status(check: Any, arrival: Arrival) -> int | None:
    """Status of a refusal; None for a request that is let in."""
    try:
        check.check(arrival)
    except ApiError as error:
        return error.status
    return None


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "localhost.", "a.localhost:1", "127.0.0.1:80", "10.1.2.3"),
        *("[::1]", "[::1]:8000", "[2001:db8::1]"),
    ],
)
def test_loopback_names_and_addresses_are_served(host: str) -> None:
    assert status(HostCheck(()), arrived(host=host)) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example"),
        *("127.1", "0x7f.0.0.1", "2130706433", "[::1].evil", "[fe80::1%25eth0]", "a@localhost"),
        *("localhost:80:80", "local host", "", "localhost/x", "[1.2.3.4]"),
    ],
)
def test_a_name_that_points_here_without_being_allowed_is_refused(host: str) -> None:
    assert status(HostCheck(()), arrived(host=host)) in (400, 403)


def test_hosts_that_an_operator_names_are_served_and_no_other() -> None:
    check = HostCheck(["api.example.org", "*.gpu.example.org"])
    for host in ("api.example.org", "API.Example.org.:443", "a.gpu.example.org"):
        assert status(check, arrived(host=host)) is None
    for host in ("example.org", "b.api.example.org", "gpu.example.org", "xgpu.example.org"):
        assert status(check, arrived(host=host)) == 403
    assert status(HostCheck(["*"]), arrived(host="any.thing")) is None
    assert status(HostCheck(["*"]), arrived()) is None


def test_a_request_names_one_host() -> None:
    assert status(HostCheck(()), arrived()) == 400
    two = arrived(host="localhost")
    two.headers[b"host"] *= 2
    assert status(HostCheck(()), two) == 400


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "*.*.example", "", "a b"])
def test_what_is_no_host_can_not_be_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        HostCheck([name])


@pytest.mark.parametrize(
    ("origin", "host", "refused"),
    [
        (None, "localhost", None),
        ("http://localhost:8000", "localhost:8000", None),
        ("http://localhost", "localhost:80", None),
        ("https://api.example.org", "api.example.org", None),
        ("https://ok.example", "localhost", None),
        ("https://ok.example:443", "localhost", None),
        ("HTTPS://OK.example", "localhost", None),
        ("http://ok.example", "localhost", 403),
        ("https://ok.example:444", "localhost", 403),
        ("https://ok.example.evil.example", "localhost", 403),
        ("http://localhost:3000", "localhost:8000", 403),
        ("https://evil.example", "localhost", 403),
        ("null", "localhost", 403),
        ("", "localhost", 403),
        ("https://ok.example/", "localhost", 403),
        ("https://a@ok.example", "localhost", 403),
        ("file://", "localhost", 403),
    ],
)
def test_pages_of_other_sites_may_call_where_they_are_named(
    origin: str | None, host: str, refused: int | None
) -> None:
    given = {"host": host} if origin is None else {"host": host, "origin": origin}
    assert status(OriginCheck(["https://ok.example"]), arrived(method="POST", **given)) == refused


def test_answers_name_the_origin_that_may_read_them_and_no_other() -> None:
    check = OriginCheck(["https://ok.example"])
    allowed = arrived(host="localhost", origin="https://ok.example")
    check.check(allowed)
    assert (b"access-control-allow-origin", b"https://ok.example") in allowed.call_log.headers
    assert (b"vary", b"origin") in allowed.call_log.headers
    same = arrived(host="localhost", origin="http://localhost")
    check.check(same)
    assert same.call_log.headers == []
    anybody = arrived(host="localhost", origin="https://any.example")
    OriginCheck(["*"]).check(anybody)
    assert (b"access-control-allow-origin", b"https://any.example") in anybody.call_log.headers


@pytest.mark.parametrize("origin", ["ok.example", "https://ok.example/", "null", "https://", ""])
def test_what_is_no_origin_can_not_be_allowed(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed_origins"):
        OriginCheck([origin])


def test_a_preflight_is_answered_for_allowed_origins_alone() -> None:
    asks = {"host": "localhost", "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,x-stainless-os"
    allowed = arrived(method="OPTIONS", origin="https://ok.example", **asks)
    with pytest.raises(Preflight):
        OriginCheck(["https://ok.example"]).check(allowed)
    answer = dict(allowed.call_log.headers)
    assert answer[b"access-control-allow-headers"] == b"authorization,x-stainless-os"
    assert b"POST" in answer[b"access-control-allow-methods"]
    assert b"access-control-allow-credentials" not in answer
    other = arrived(method="OPTIONS", origin="https://evil.example", **asks)
    assert status(OriginCheck(["https://ok.example"]), other) == 403
    asks["access-control-request-headers"] = "x\r\nset-cookie: a"
    split = arrived(method="OPTIONS", origin="https://ok.example", **asks)
    assert status(OriginCheck(["https://ok.example"]), split) == 400


@pytest.mark.asyncio
async def test_a_preflight_needs_no_key_and_what_follows_does() -> None:
    settings = ServerSettings(
        api_keys=["some-very-secret-key"], allowed_origins=["https://ok.example"]
    )
    origin = {"origin": "https://ok.example"}
    asks = origin | {"access-control-request-method": "POST"}
    async with served(settings, num_pages=64) as (_, client):
        before = await client.options("/v1/completions", headers=asks)
        after = await client.post("/v1/completions", json=BODY, headers=origin)
        other = await client.options("/v1/completions", headers=asks | {"origin": "https://no.x"})
    assert (before.status_code, after.status_code, other.status_code) == (204, 401, 403)
    assert after.headers["access-control-allow-origin"] == "https://ok.example"
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("query", "refused"),
    [
        (b"", None),
        (b"limit=3&after=resp_1&order=asc", None),
        (b"api_key=x", 400),
        (b"a=b&API-Key=x", 400),
        (b"x-api-key", 400),
        (b"access_token=x", 400),
        (b"%61pi_key=x", 400),
        (b"token=", 400),
        (b"monkey=x&tokens=3", None),
    ],
)
def test_credentials_in_queries_are_refused(query: bytes, refused: int | None) -> None:
    assert status(QueryCheck(), arrived(query)) == refused


def test_headers_have_a_limit_in_number_and_in_bytes() -> None:
    eight = {f"h{i}": "v" for i in range(8)}
    assert status(HeaderCheck(8, 1024), arrived(**eight)) is None
    assert status(HeaderCheck(7, 1024), arrived(**eight)) == 431
    length = 1 + 2 + 8 * 3  # path, query, and name and value of each
    assert status(HeaderCheck(8, length), arrived(b"ab", **eight)) is None
    assert status(HeaderCheck(8, length - 1), arrived(b"ab", **eight)) == 431


@pytest.mark.asyncio
async def test_limits_on_headers_hold_for_an_app() -> None:
    async with served(ServerSettings(max_headers=8, max_header_bytes=1024), num_pages=64) as (
        _,
        client,
    ):
        few = len(client.headers) + 1  # and host
        at = {f"x-{i}": "v" for i in range(8 - few)}
        assert (await client.get("/v1/models", headers=at)).status_code == 200
        assert (await client.get("/v1/models", headers=at | {"y": "v"})).status_code == 431
        answer = await client.get("/v1/models", headers={"y": "v" * 1024})
        assert answer.status_code == 431
        assert answer.json()["error"]["code"] == "headers_too_large"


@pytest.mark.asyncio
async def test_bodies_have_a_limit() -> None:
    async with served(ServerSettings(max_body_bytes=1024), num_pages=64) as (_, client):
        for length, expected in ((1024, 400), (1025, 413)):
            body = b"[" + b" " * (length - 2) + b"]"
            headers = {"content-type": "application/json"}
            answer = await client.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == expected


@pytest.mark.asyncio
@pytest.mark.parametrize(("seconds", "expected"), [(600.0, b"200"), (0.1, b"408")])
async def test_a_body_must_come_in_time(seconds: float, expected: bytes) -> None:
    async with Engine(num_pages=64) as engine:
        app = create_app(engine, ServerSettings(body_timeout_seconds=seconds))
        async with listening(app) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = b'{"model": "pyhelp", "prompt": "a", "max_tokens": 1}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + (body if expected == b"200" else body[:-1]))
            assert (await reader.readline()).split()[1] == expected
            writer.close()


@pytest.mark.asyncio
async def test_so_many_calls_are_in_progress_and_one_more_is_refused() -> None:
    settings = ServerSettings(max_concurrent_calls=2)
    body = BODY | {"max_tokens": 500, "ignore_eos": True, "stream": True}
    async with served(settings, num_pages=256) as (engine, client):
        calls = [
            asyncio.create_task(client.post("/v1/completions", json=body, timeout=LIMIT_SECONDS))
            for _ in range(2)
        ]
        await until(lambda: engine.stats().num_running == 2)
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "server_overloaded"
        assert (await client.get("/metrics")).status_code == 200
        for call in calls:
            call.cancel()
        await until(lambda: not engine.stats().num_running)
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200


@given(st.lists(st.binary(max_size=140), max_size=2))
def test_a_request_id_is_printable_ascii_or_is_replaced(values: list[bytes]) -> None:
    found = given_request_id({b"x-request-id": values})
    if len(values) == 1 and 0 < len(values[0]) <= MAX_REQUEST_ID_CHARS:
        fits = all(33 <= byte <= 126 for byte in values[0])
        assert found == (values[0].decode("latin-1") if fits else None)
    else:
        assert found is None


@pytest.mark.parametrize(("length", "kept"), [(128, True), (129, False)])
def test_a_request_id_has_a_limit(length: int, kept: bool) -> None:
    assert (given_request_id({b"x-request-id": [b"i" * length]}) is not None) == kept


@pytest.mark.asyncio
async def test_request_ids_come_back_and_may_be_the_same_at_once() -> None:
    body = BODY | {"max_tokens": 20, "ignore_eos": True}
    async with served(num_pages=256) as (_, client):
        same = {"x-request-id": "job-7"}
        calls = [client.post("/v1/completions", json=body, headers=same) for _ in range(4)]
        answers = await asyncio.gather(*calls)
        bare = await client.get("/v1/models")
        bad = await client.get("/v1/models", headers={"x-request-id": "a b"})
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.headers["x-request-id"] for answer in answers} == {"job-7"}
    assert len({answer.json()["id"] for answer in answers}) == 4
    assert len(bare.headers["x-request-id"]) == 32
    assert bad.headers["x-request-id"] != "a b"


@pytest.mark.asyncio
async def test_all_answers_have_the_headers_that_keep_browsers_safe() -> None:
    async with served(num_pages=64) as (_, client):
        answers: list[httpx.Response] = [
            await client.get("/v1/models"),
            await client.get("/no/such"),
            await client.post("/v1/completions", json=BODY | {"stream": True}),
            await client.get("/v1/models", headers={"host": "evil.example"}),
        ]
    assert [answer.status_code for answer in answers] == [200, 404, 200, 403]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.asyncio
async def test_web_sockets_are_refused() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with Engine(num_pages=64) as engine:
        scope = {"type": "websocket", "path": "/v1/models", "headers": [], "query_string": b""}
        await create_app(engine)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.asyncio
async def test_a_bug_in_a_route_is_told_as_one_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("/secret/path")

    async with Engine(num_pages=64) as engine:
        app = create_app(engine)
        app.mount("/broken", broken)
        async with client_of(app) as client:
            answer = await client.get("/broken/x", headers={"x-request-id": "job-8"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "/secret/path" not in answer.text
    assert answer.headers["x-request-id"] == "job-8"
    assert any("job-8 failed" in one.getMessage() for one in caplog.records)
    assert logging.getLogger("aioserve.access").level == logging.NOTSET
