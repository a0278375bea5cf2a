"""API keys: they let callers in and identify them, and nothing reveals a key."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ConfigError
from aioserve.server import ServerSettings
from aioserve.server.app import ENDPOINTS, PAGE_ENDPOINTS
from aioserve.server.call_log import CallLog
from aioserve.server.errors import ApiError
from aioserve.server.page import PAGE_PATHS
from aioserve.server.request_checks import OPERATOR_PATHS, Arrival, KeyCheck, checks_of
from aioserve.server.settings import MAX_KEYS, keys_of
from tests.server.serving import served

ALICE, BOB = "alice's-very-secret-key", "bob-has-another-secret-key"
KEYS = {"alice": ALICE, "bob": BOB}
ROUTES = ("/", "/metrics", "/openapi.json", "/v1/models", "/v1/completions", "/no/such", "/health/")
BODY: dict[str, Any] = {"model": "pyhelp", "prompt": "json.dumps", "max_tokens": 2}


def arrived(path: str = "/v1/models", method: str = "GET", **headers: bytes) -> Arrival:
    named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    scope = {"method": method, "path": path, "headers": named, "query_string": b""}
    return Arrival(scope, CallLog())


def holder(check: KeyCheck, arrival: Arrival) -> str | None:
    """Tenant of a call; None for a refused one."""
    try:
        check.check(arrival)
    except ApiError as error:
        return None if error.status == 401 else str(error.status)
    return arrival.call_log.tenant


@pytest.mark.asyncio
async def test_every_route_needs_a_key_and_says_so_in_the_shape_of_its_api() -> None:
    async with served(ServerSettings(api_keys=KEYS), num_pages=64) as (_, client):
        for path in ROUTES:
            for method in ("GET", "POST", "OPTIONS", "PUT"):
                if method == "GET" and path in PAGE_PATHS:
                    continue  # a browser has no key yet
                for headers in ({}, {"authorization": "Bearer wrong-key-of-nobody"}):
                    answer = await client.request(method, path, headers=headers)
                    assert answer.status_code == 401, (path, method, headers)
                    assert answer.headers["www-authenticate"] == 'Bearer realm="aioserve"'
                    assert answer.json()["error"]["type"] == "authentication_error"
        for path in ("/health", "/ready"):  # answered by other paths, or by none
            assert (await client.get(path)).status_code != 401
            assert (await client.post(path)).status_code == 401
        for headers in ({"authorization": f"bearer {ALICE}"}, {"x-api-key": BOB}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("keys", "operators", "seen_by"),
    [
        (KEYS, (), ()),
        (KEYS, ("bob",), ("bob",)),
        (KEYS, ("bob", "alice"), ("alice", "bob")),
        ({"bob": BOB}, (), ("bob",)),  # who sees the requests of all keys
        ({}, (), ("alice", "bob", "nobody")),
    ],
)
async def test_what_shows_the_requests_of_all_keys_is_for_operators(
    keys: dict[str, str], operators: tuple[str, ...], seen_by: tuple[str, ...]
) -> None:
    settings = ServerSettings(api_keys=keys, operators=operators)
    async with served(settings, num_pages=64) as (_, client):
        for path in ("/metrics", "/live/now", "/trace", "/live"):
            for name, key in {**KEYS, "nobody": "wrong-key-of-nobody"}.items():
                headers = {"x-api-key": key}
                for method in ("GET", "HEAD") if path == "/metrics" else ("GET",):
                    async with client.stream(method, path, headers=headers) as answer:
                        if name in seen_by:
                            assert answer.status_code == 200, (path, name)
                        else:
                            assert answer.status_code == (403 if name in keys else 401)
                            text = (await answer.aread()).decode()
                            assert "alice" not in text or name == "alice"
                            assert method == "HEAD" or "aioserve_requests" not in text


@pytest.mark.parametrize("end", ["%0A", "%0D%0A", "%00", "%7F", "%C2%85", "%E2%80%A8"])
@pytest.mark.asyncio
async def test_no_spelling_of_an_operators_path_is_another_route(end: str) -> None:
    settings = ServerSettings(api_keys=KEYS, operators=["bob"])
    async with served(settings, num_pages=64) as (_, client):
        for path in sorted(OPERATOR_PATHS):
            for key in KEYS.values():
                answer = await client.get(path + end, headers={"x-api-key": key})
                assert answer.status_code == 404
                assert "aioserve_" not in answer.text


@pytest.mark.asyncio
async def test_a_path_that_an_operator_opens_is_open() -> None:
    settings = ServerSettings(api_keys=KEYS, open_paths=["/metrics"])
    async with served(settings, num_pages=64) as (_, client):
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/trace", headers={"x-api-key": BOB})).status_code == 403


@pytest.mark.parametrize("keys", [KEYS, {}])
def test_operators_are_names_of_keys(keys: dict[str, str]) -> None:
    settings = ServerSettings(api_keys=keys, operators=["alice", "carol"])
    with pytest.raises(ConfigError, match="operators must be names of api_keys") as caught:
        checks_of(settings)
    assert caught.value.argument == "operators"


def test_every_page_of_operators_is_one_of_the_app() -> None:
    served_here = {endpoint.path for endpoint in (*ENDPOINTS, *PAGE_ENDPOINTS)} | {"/metrics"}
    assert served_here >= OPERATOR_PATHS
    shown = {endpoint.path for endpoint in PAGE_ENDPOINTS} | {"/metrics"}
    assert shown | {"/server_info", "/reset_prefix_cache"} <= OPERATOR_PATHS


@given(
    names=st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=6),
    sent=st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from(["", "x"])), max_size=3
    ),
)
def test_a_key_opens_if_it_is_one_of_them_and_no_other_was_sent(
    names: list[int], sent: list[tuple[bool, int, str]]
) -> None:
    keys = {f"tenant-{name}": f"secret-number-{name}" for name in names}
    headers = []
    for bearer, name, wrong in sent:
        key = f"secret-number-{name}{wrong}".encode()
        headers.append((b"authorization", b"Bearer " + key) if bearer else (b"x-api-key", key))
    arrival = arrived()
    arrival = Arrival({**arrival.scope, "headers": headers}, arrival.call_log)
    whom = {f"tenant-{name}" if not wrong and name in names else None for _, name, wrong in sent}
    expected = whom.pop() if len(whom) == 1 else None
    assert holder(KeyCheck(keys_of(keys), ()), arrival) == expected


@pytest.mark.parametrize(
    "value",
    [b"Basic " + ALICE.encode(), ALICE.encode(), b"Bearer", b"Bearer ", b"", b"Bearer \xff\xfe"],
)
def test_what_is_no_bearer_of_a_key_is_refused(value: bytes) -> None:
    assert holder(KeyCheck(keys_of(KEYS), ()), arrived(authorization=value)) is None


def test_without_keys_all_may_call_whatever_key_they_send() -> None:
    check = KeyCheck((), ())
    arrival = arrived(authorization=b"Bearer sk-anything")
    check.check(arrival)
    assert arrival.call_log.tenant is None


def test_each_tenant_has_a_salt_of_its_own_that_stays_the_same() -> None:
    first, again = keys_of(KEYS), keys_of(KEYS)
    assert first == again
    assert len({key.cache_salt for key in first}) == 2
    assert keys_of([ALICE])[0].cache_salt == first[0].cache_salt
    assert all(key.digest.hex() not in key.cache_salt for key in first)


@pytest.mark.asyncio
async def test_tenants_never_find_the_cached_prefixes_of_others() -> None:
    body = BODY | {"prompt": "import os\n" * 20}
    async with served(ServerSettings(api_keys=KEYS), num_pages=128) as (_, client):

        async def cached(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await cached(ALICE), await cached(BOB)] == [0, 0]
        assert await cached(ALICE) > 0
        assert await cached(BOB) > 0


@pytest.mark.asyncio
async def test_nothing_shows_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = ServerSettings(api_keys=KEYS)
    headers = {"authorization": f"Bearer {ALICE}", "x-api-key": BOB}
    async with served(settings, num_pages=64) as (engine, client):
        answers = [
            await client.get("/v1/models", headers=headers),
            await client.post("/v1/completions", json=BODY, headers={"x-api-key": ALICE}),
            await client.get("/metrics", headers={"x-api-key": ALICE}),
            await client.get(f"/v1/models?api_key={BOB}"),
        ]
        shown = [repr(settings), str(settings), str(msgspec.structs.asdict(settings))]
        shown += [str(engine.dump()), *[answer.text + str(answer.headers) for answer in answers]]
    logged = [one.getMessage() for one in caplog.records if one.name.startswith("aioserve")]
    assert any("/v1/completions" in line for line in logged)
    for text in [*shown, *logged]:  # the client's own log shows URLs
        assert ALICE not in text
        assert BOB not in text
    assert "alice" in repr(settings)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("a-single-key-as-text", "mapping"),
        (["short12"], "8 to 512"),
        (["k" * 513], "8 to 512"),
        (["with a space in it"], "without spaces"),
        (["schlüssel-mit-umlaut"], "ASCII"),
        ({"a name": "key-of-a-wrong-name"}, "names of"),
        ({"n" * 65: "key-of-a-wrong-name"}, "names of"),
        ({"a": ALICE, "b": ALICE}, "differ"),
        ([12345678], "must be a str"),
        ([f"key-number-{i:05d}" for i in range(MAX_KEYS + 1)], "at most 1024"),
    ],
)
def test_keys_that_are_none_are_refused_and_not_shown(given: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(api_keys=given)
    assert says in str(caught.value)
    for key in given.values() if isinstance(given, dict) else given:
        assert len(str(key)) < 2 or str(key) not in f"{caught.value}{caught.value.value}"


def test_keys_at_their_limits_are_taken_and_weak_ones_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ServerSettings(api_keys=["k" * 8, "k" * 512])
    assert "key-1 has 8 characters" in caplog.text
    assert len(keys_of([f"key-number-{i:05d}" for i in range(MAX_KEYS)])) == MAX_KEYS


def test_settings_that_are_changed_keep_their_keys() -> None:
    settings = ServerSettings(api_keys=KEYS)
    assert msgspec.structs.replace(settings, max_n=2).keys == settings.keys
