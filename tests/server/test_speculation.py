"""Draft tokens over HTTP: fields of requests, and the numbers in usage, metrics and `/live`."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve import Speculation
from tests.server.serving import served
from tests.server.talking import post
from tests.server.test_metrics import scraped, value

pytestmark = pytest.mark.asyncio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "What does json.dumps do?"}]
BODY: dict[str, Any] = {
    "model": "pyhelp",
    "messages": ASK,
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}
DETAILS = "completion_tokens_details"
OPTIONS: dict[str, Any] = {
    "speculation": Speculation(drafter="ngram:min_ngram=1", max_tokens=4),
    "num_pages": 128,
    "prefix_caching": False,
}


async def test_a_prediction_changes_counts_and_no_text() -> None:
    async with served(**OPTIONS) as (engine, client):
        plain = await post(client, CHAT, BODY | {"max_draft_tokens": 0})
        text = plain["choices"][0]["message"]["content"]
        assert plain["usage"][DETAILS] == {"reasoning_tokens": 0}
        assert engine.stats().tokens_drafted_total == ()
        half = len(text) // 2
        parts = [{"type": "text", "text": each} for each in (text[:half], text[half:])]
        for content in (text, parts):
            prediction = {"type": "content", "content": content}
            before = engine.stats()
            answer = await post(client, CHAT, BODY | {"prediction": prediction})
            after = engine.stats()
            assert answer["choices"][0]["message"]["content"] == text
            details = answer["usage"][DETAILS]
            drafted = sum(after.tokens_drafted_total) - sum(before.tokens_drafted_total)
            accepted = sum(after.tokens_accepted_total) - sum(before.tokens_accepted_total)
            assert details["accepted_prediction_tokens"] == accepted > 0
            assert details["rejected_prediction_tokens"] == drafted - accepted
            assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        for content in ("", []):  # for an empty file that is to be edited
            answer = await post(
                client, CHAT, BODY | {"prediction": {"type": "content", "content": content}}
            )
            assert answer["choices"][0]["message"]["content"] == text


async def test_the_numbers_of_drafts_are_those_of_the_engine() -> None:
    prompt = "import json\nimport os\n" * 4
    body = {"model": "pyhelp", "prompt": prompt, "max_tokens": 32, "temperature": 0}
    async with served(**OPTIONS) as (engine, client):
        first = (await client.get("/live/now")).json()
        assert "drafted_tokens" not in first
        usage = (await post(client, COMPLETIONS, body | {"ignore_eos": True}))["usage"]
        stats, found = engine.stats(), await scraped(client)
        live = (await client.get("/live/now")).json()
        drafted, accepted = stats.tokens_drafted_total, stats.tokens_accepted_total
        for position, counts in enumerate(zip(drafted, accepted, strict=True)):
            labels = {"drafter": "ngram", "position": position}
            for name, count in zip(("drafted", "accepted_draft"), counts, strict=True):
                assert value(found, f"aioserve_{name}_tokens_total", **labels) == count
        assert value(found, "aioserve_drafter_faults_total") == 0
    assert 0 < len(drafted) <= 4
    assert live["drafted_tokens"] == sum(drafted) > 0
    assert live.get("accepted_tokens", 0) == sum(accepted)
    details = usage[DETAILS]
    assert details["accepted_prediction_tokens"] == sum(accepted)
    assert details["rejected_prediction_tokens"] == sum(drafted) - sum(accepted)


async def test_an_engine_without_speculation_has_no_numbers_of_drafts() -> None:
    async with served(num_pages=64) as (_, client):
        names = {name for name, _ in await scraped(client)}
        assert "drafted_tokens" not in (await client.get("/live/now")).json()
    assert not {name for name in names if "draft" in name}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_draft_tokens": 5}, "max_draft_tokens"),
    (COMPLETIONS, {"max_draft_tokens": 5}, "max_draft_tokens"),
    (CHAT, {"prediction": {"type": "content", "content": "x" * 100_000}}, "prediction"),
    (
        CHAT,
        {"prediction": {"type": "content", "content": "x"}, "max_draft_tokens": 0},
        "prediction",
    ),
    (COMPLETIONS, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    (CHAT, {"max_draft_tokens": 1, "use_beam_search": True}, "max_draft_tokens"),
    (
        CHAT,
        {"prediction": {"type": "content", "content": "x"}, "use_beam_search": True},
        "prediction",
    ),
]


async def test_what_there_is_not_is_refused_by_name() -> None:
    async with served(**OPTIONS) as (_, client):
        for path, more, param in REFUSED:
            asked = BODY if path == CHAT else {"model": "pyhelp", "prompt": "x", "max_tokens": 2}
            answer = await client.post(path, json=asked | more)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
