"""Ollama's embeddings: vectors of texts, as the engine makes them."""

from __future__ import annotations

import numpy as np
import pytest

from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import post

pytestmark = pytest.mark.asyncio

TEXTS = ["What does json.dumps do?", "os"]


async def test_each_text_has_a_vector_of_length_one() -> None:
    async with served(num_pages=256) as (engine, client):
        body = {"model": "pyhelp", "input": TEXTS, "keep_alive": "5m", "options": {"seed": 1}}
        answer = await post(client, "/api/embed", body)
        one = await post(client, "/api/embed", body | {"input": TEXTS[0]})
        first = await post(client, "/api/embed", body | {"dimensions": 3})
        expected, usage = await engine.embed_counted(TEXTS, normalize=True)
    assert np.allclose(answer["embeddings"], expected, atol=1e-5)
    assert np.allclose(one["embeddings"], expected[:1], atol=1e-5)
    cut = expected[:, :3] / np.linalg.norm(expected[:, :3], axis=1, keepdims=True)
    assert np.allclose(first["embeddings"], cut, atol=1e-5)
    assert answer["prompt_eval_count"] == usage.prompt_tokens
    assert answer["total_duration"] > 0


async def test_the_older_path_tells_one_vector_as_it_is() -> None:
    async with served(num_pages=256) as (engine, client):
        answer = await post(client, "/api/embeddings", {"model": "pyhelp", "prompt": TEXTS[0]})
        expected = await engine.embed(TEXTS[0], normalize=False)
        empty = await post(client, "/api/embeddings", {"model": "pyhelp"})
    assert np.allclose(answer["embedding"], expected, atol=1e-4)
    assert empty == {"embedding": []}


async def test_a_text_beyond_the_context_is_cut_unless_that_is_refused() -> None:
    long = "json " * 300
    async with served(num_pages=256, max_model_len=64) as (engine, client):
        body = {"model": "pyhelp", "input": long}
        answer = await post(client, "/api/embed", body)
        whole = await client.post("/api/embed", json=body | {"truncate": False})
        cut = {"truncate_prompt_tokens": 63, "truncation_side": "right"}
        expected = await engine.embed([long], normalize=True, **cut)
        smaller = await post(client, "/api/embed", body | {"options": {"num_ctx": 16}})
        none = await client.post("/api/embed", json=body | {"options": {"num_ctx": 0}})
    assert np.allclose(answer["embeddings"], expected, atol=1e-5)
    assert answer["prompt_eval_count"] == 63
    assert smaller["prompt_eval_count"] == 16
    assert (none.status_code, "options.num_ctx" in none.json()["error"]) == (400, True)
    assert whole.status_code == 400
    assert set(whole.json()) == {"error"}


@pytest.mark.parametrize(
    ("path", "change", "status", "why"),
    [
        ("/api/embed", {"input": ["a", "b", "c"]}, 400, "input must have at most 2 entries"),
        ("/api/embed", {"input": ["a", ""]}, 400, "input[1]"),
        ("/api/embed", {"input": "a", "dimensions": 10**6}, 400, "dimensions must be in"),
        ("/api/embed", {"model": "other"}, 404, "the model 'other' isn't served here"),
        ("/api/embeddings", {"input": "a"}, 400, "input isn't"),
    ],
)
async def test_what_is_wrong_is_named(path: str, change: dict, status: int, why: str) -> None:
    async with served(ServerSettings(max_inputs=2), num_pages=256) as (_, client):
        answer = await client.post(path, json={"model": "pyhelp"} | change)
    assert answer.status_code == status, answer.text
    assert why in answer.json()["error"]


async def test_no_text_asks_for_a_model_that_is_there() -> None:
    async with served(num_pages=256) as (_, client):
        for given in ([], "", [""]):
            answer = await post(client, "/api/embed", {"model": "pyhelp", "input": given})
            assert answer["embeddings"] == []


async def test_embeddings_take_as_many_texts_as_clients_send() -> None:
    """LangChain sends 100 at a time by default, and OpenAI takes 2,048."""
    texts = [str(number) for number in range(300)]
    async with served(num_pages=256) as (engine, client):
        answer = await post(client, "/v1/embeddings", {"model": "pyhelp", "input": texts})
        last = await engine.embed(texts[-1])
    assert len(answer["data"]) == 300
    assert np.allclose(answer["data"][-1]["embedding"], last, atol=1e-5)
