"""`/openapi.json` describes what is served, and requests made from it get the described answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from aioserve.server.app import ENDPOINTS, PAGE_ENDPOINTS
from aioserve.server.openapi import document
from tests.server.scripts import with_tools
from tests.server.serving import listening
from tests.tiers import examples
from tests.waits import LIMIT_SECONDS

DOCUMENT = document(ENDPOINTS, ServerSettings())
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
"""Checks of schemathesis. Others would expect that all values of a type are accepted, despite
limits."""
OPERATIONS = [
    (path, method) for path, methods in DOCUMENT["paths"].items() for method in sorted(methods)
]


@contextmanager
def served_in_a_thread(model: Path) -> Iterator[str]:
    """URL of a server in a thread, as schemathesis knows no event loop."""
    found: list[str] = []
    started, done = threading.Event(), threading.Event()

    async def serve() -> None:
        names = ServerSettings(served_model_names=["pyhelp"])
        async with Engine(model, num_pages=256, max_model_len=256) as engine:
            async with listening(create_app(engine, names)) as url:
                found.append(url)
                started.set()
                await asyncio.to_thread(done.wait)
            assert not engine.stats().pages_held_by_requests

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(LIMIT_SECONDS)
        yield found[0]
    finally:
        done.set()
        thread.join()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_in_a_thread(with_tools(tmp_path_factory.mktemp("model"))) as url:
        yield url


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_whatever_is_sent_is_answered_as_described(path: str, method: str, url: str) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    operation = schema[path][method.upper()]

    @settings(
        max_examples=examples(40),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["model"] = "pyhelp"
        answer = case.call(base_url=url, timeout=LIMIT_SECONDS)
        assert answer.status_code != 500, (case.body, answer.text)
        assert str(answer.status_code) in operation.definition.raw["responses"], answer.text
        if answer.headers["content-type"][0].startswith("application/json"):
            case.validate_response(answer, checks=CHECKS)

    check()


def test_all_that_is_served_is_described() -> None:
    assert len(OPERATIONS) == len(ENDPOINTS)
    assert all(each.summary for each in ENDPOINTS)
    kept = document(ENDPOINTS, ServerSettings(api_keys=["a-very-secret-key"]))
    assert kept["security"] == [{"key": []}]
    assert "security" not in DOCUMENT


def test_limits_of_the_settings_stand_in_the_document() -> None:
    settings_ = ServerSettings(max_n=3, max_stops=2, max_tools=5, max_top_logprobs=7)
    schemas = document(ENDPOINTS, settings_)["components"]["schemas"]

    def limits(kind: str, field: str) -> dict[str, int]:
        found = schemas[kind]["properties"][field]
        keywords = ("maximum", "maxItems", "maxProperties")
        return {
            key: value for one in found["anyOf"] for key, value in one.items() if key in keywords
        }

    assert limits("ChatRequest", "n") == limits("CompletionRequest", "best_of") == {"maximum": 3}
    assert limits("ChatRequest", "stop") == {"maxItems": 2}
    assert limits("MessageRequest", "stop_sequences") == {"maxItems": 2}
    for kind in ("ChatRequest", "ResponseRequest", "MessageRequest", "TokenizeRequest"):
        assert limits(kind, "tools") == {"maxItems": 5}
    assert limits("CompletionRequest", "logprobs") == {"maximum": 7}
    assert limits("ChatRequest", "metadata") == {"maxProperties": settings_.max_metadata}


def test_no_name_of_a_schema_depends_on_where_its_class_stands() -> None:
    names = list(DOCUMENT["components"]["schemas"])
    assert names
    assert [name for name in names if not name.isidentifier() or "aioserve" in name] == []


def test_media_types_are_those_that_answers_have() -> None:
    shown = document([*ENDPOINTS, *PAGE_ENDPOINTS], ServerSettings())["paths"]

    def media_types(path: str) -> set[str]:
        (operation,) = shown[path].values()
        return set(operation["responses"]["200"]["content"])

    json, events = "application/json", "text/event-stream"
    assert media_types("/live") == {events}
    assert media_types("/v1/messages") == media_types("/v1/completions") == {json, events}
    assert media_types("/api/chat") == {json, "application/x-ndjson"}
    assert media_types("/v1/embeddings") == media_types("/live/now") == {json}
