"""Bounds of answers: each is checked before anything is computed, and all share one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine
from aioserve.engine.intake import Intake
from aioserve.server import ServerSettings, create_app
from aioserve.server.answer_sizes import AnswerSize, Kept, Unsent, most_tokens_of
from aioserve.server.errors import ApiError
from tests.server.serving import client_of, served
from tests.waits import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]
LIMIT = 2**16
TIGHT = ServerSettings(max_answer_bytes=LIMIT, max_unsent_bytes=LIMIT)

LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "echo": (
        COMPLETIONS,
        {"prompt": ["a " * 50] * 8, "n": 4, "echo": True, "logprobs": 5, "max_tokens": 1},
    ),
    "prompt_logprobs": (
        COMPLETIONS,
        {"prompt": ["a " * 50] * 8, "n": 4, "prompt_logprobs": 5, "max_tokens": 1},
    ),
    "echo, streamed": (
        COMPLETIONS,
        {
            "prompt": [[7] * 100] * 8,
            "n": 4,
            "echo": True,
            "logprobs": 5,
            "max_tokens": 1,
            "stream": True,
        },
    ),
    "samples": (COMPLETIONS, {"prompt": ["a"] * 8, "n": 4, "logprobs": 5, "max_tokens": 20}),
    "best_of": (COMPLETIONS, {"prompt": "a", "best_of": 16, "logprobs": 5, "max_tokens": 99}),
    "beams": (
        COMPLETIONS,
        {"prompt": ["a"] * 16, "n": 16, "use_beam_search": True, "max_tokens": 99},
    ),
    "chat": (
        CHAT,
        {"messages": USER, "n": 8, "logprobs": True, "top_logprobs": 9, "max_tokens": 20},
    ),
    "chat without max_tokens": (
        CHAT,
        {"messages": USER, "n": 8, "logprobs": True, "top_logprobs": 9},
    ),
    "batch": (
        f"{CHAT}/batch",
        {"messages": [USER] * 8, "logprobs": True, "top_logprobs": 9, "max_tokens": 20},
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "a",
            "top_logprobs": 9,
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 99,
        },
    ),
    "api/generate": ("/api/generate", {"prompt": "a", "stream": False, "options": {}}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 100_000}),
}


OF_TEXT = ("api/generate", "messages")
"""Answers without log-probabilities, whose errors have another format."""


@asynccontextmanager
async def tight(settings: ServerSettings = TIGHT) -> AsyncIterator[tuple[Engine, Any, Any]]:
    async with Engine("pyhelp", max_model_len=1024) as engine:
        app = create_app(engine, settings)
        async with client_of(app) as client:
            yield engine, client, app.state.app_state.unsent


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LONG)
@pytest.mark.asyncio
async def test_a_product_that_is_too_long_is_refused_at_the_door(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fields = LONG[name]
    limit = 2**12 if name in OF_TEXT else LIMIT
    submit = mock.Mock(side_effect=AssertionError("it was submitted"))
    monkeypatch.setattr(Intake, "submit", submit)
    settings = ServerSettings(max_answer_bytes=limit)
    async with served(settings, num_pages=2048) as (_, client):
        answer = await client.post(path, json={"model": "pyhelp", **fields})
    assert answer.status_code == 400, answer.text
    assert f"max_answer_bytes is {limit}" in answer.text
    assert "choices of each: " in answer.text
    if name not in OF_TEXT:
        assert answer.json()["error"]["code"] == "limit_exceeded"
    assert not submit.called


@pytest.mark.parametrize("name", ["samples", "chat", "chat without max_tokens"])
@pytest.mark.asyncio
async def test_a_stream_has_no_length(name: str) -> None:
    """Text isn't made before its client has read what came before."""
    path, fields = LONG[name]
    fields = fields | {"prompt": "a"} if "prompt" in fields else fields
    settings = ServerSettings(max_answer_bytes=2**18)
    async with served(settings, num_pages=2048, max_model_len=512) as (_, client):
        body = {"model": "pyhelp", "stream": True, **fields, "max_tokens": 3}
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")


TOLD = ("echo", "prompt_logprobs", "samples", "chat", "batch", "responses")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TOLD)
@pytest.mark.asyncio
async def test_no_answer_is_longer_than_it_was_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[AnswerSize] = []
    begin = Kept.begin

    def noted(self: Kept, size: AnswerSize) -> None:
        counted.append(size)
        begin(self, size)

    monkeypatch.setattr(Kept, "begin", noted)
    path, fields = LONG[name]
    async with served(num_pages=2048) as (_, client):
        body = {"model": "pyhelp", "ignore_eos": True, **fields}
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choices = counted[-1].prompts * counted[-1].n
    assert len(answer.content) < counted[-1].num_bytes + 1000 + 500 * choices
    assert len(answer.content) > counted[-1].num_bytes / 4


# -- all answers together


@pytest.mark.asyncio
async def test_answers_that_are_not_sent_have_a_bound_together() -> None:
    """The first is always accepted. It counts until it is read, and others are asked to come
    again."""
    settings = ServerSettings(max_unsent_bytes=LIMIT)
    long = {
        "model": "pyhelp",
        "prompt": "a",
        "n": 8,
        "logprobs": 20,
        "max_tokens": 400,
        "ignore_eos": True,
    }
    short = {"model": "pyhelp", "prompt": "a", "max_tokens": 1}
    async with tight(settings) as (_, client, unsent):
        first = asyncio.create_task(client.post(COMPLETIONS, json=long))
        await until(lambda: unsent.num_bytes)
        assert unsent.num_bytes > LIMIT
        second = await client.post(COMPLETIONS, json=short)
        assert second.status_code == 503
        assert second.headers["retry-after"] == "1"
        assert second.json()["error"]["code"] == "server_overloaded"
        assert "max_unsent_bytes" in second.json()["error"]["message"]
        assert (await first).status_code == 200
        await until(lambda: not unsent.num_bytes)
        assert (await client.post(COMPLETIONS, json=short)).status_code == 200


@pytest.mark.asyncio
async def test_an_answer_counts_for_nothing_however_it_ended() -> None:
    async with tight() as (_, client, unsent):
        body = {"model": "pyhelp", "prompt": "a", "max_tokens": 500, "ignore_eos": True}
        for more in ({}, {"stream": True}, {"temperature": -1}, {"logit_bias": {"x": 1}}):
            await client.post(COMPLETIONS, json=body | more)
            await until(lambda: not unsent.num_bytes)
        left = asyncio.create_task(client.post(COMPLETIONS, json=body | {"n": 4}))
        await until(lambda: unsent.num_bytes)
        left.cancel()
        await until(lambda: not unsent.num_bytes)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/api/embed"])
@pytest.mark.asyncio
async def test_vectors_count_until_they_are_sent(path: str) -> None:
    body = {"model": "pyhelp", "input": ["a", "b"]}
    async with tight() as (_, client, unsent):
        unsent.keep(LIMIT - 8)  # of other calls
        refused = await client.post(path, json=body)
        assert (refused.status_code, unsent.num_bytes) == (503, LIMIT - 8)
        assert "max_unsent_bytes" in refused.text
        unsent.change(LIMIT - 8, 0)
        assert (await client.post(path, json=body)).status_code == 200
        await until(lambda: not unsent.num_bytes)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 500), st.booleans(), st.integers(1, 600)),
        max_size=30,
    )
)
def test_what_is_kept_is_the_sum_of_what_calls_keep(
    events: list[tuple[int, int, bool, int]],
) -> None:
    unsent = Unsent(20_000)
    calls = [Kept(unsent, 10_000) for _ in range(4)]
    kept = [0] * 4
    sizes: list[AnswerSize | None] = [None] * 4
    for index, tokens, says, made in events:
        size = AnswerSize(tokens=tokens, says_tokens=says)
        if made % 3 == 0:
            calls[index].end()
            kept[index] = 0
        elif made % 3 == 1 and (before := sizes[index]) is not None:
            calls[index].made(made)
            kept[index] = before.made_bytes(made)
        else:
            kept[index] = 0
            is_full = sum(kept) > 0 and sum(kept) + size.kept_bytes > 20_000
            if size.num_bytes > 10_000 or is_full:
                with pytest.raises(ApiError) as caught:
                    calls[index].begin(size)
                assert caught.value.status == (400 if size.num_bytes > 10_000 else 503)
            else:
                calls[index].begin(size)
                kept[index], sizes[index] = size.kept_bytes, size
        assert unsent.num_bytes == sum(kept)
    for call in calls:
        call.end()
    assert unsent.num_bytes == 0


def test_the_tokens_of_a_text_are_at_most_its_bytes_and_the_context() -> None:
    assert most_tokens_of(["aé", [1, 2, 3], "x" * 100], 10) == 3 + 3 + 10
