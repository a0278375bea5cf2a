"""`/score` and `/rerank`, over a real socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import post

pytestmark = pytest.mark.asyncio
TEXTS = ["json.dumps", "a regular expression", "json.loads", "threads"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_scores_are_cosines_of_embeddings(path: str, pooling: Any) -> None:
    async with served(num_pages=256) as (engine, client):
        vectors = await engine.embed(TEXTS, pooling=pooling)
        body = {"model": "pyhelp", "pooling": pooling}
        one_to_all = await post(client, path, body | {"text_1": TEXTS[0], "text_2": TEXTS})
        pairs = await post(client, path, body | {"text_1": TEXTS[:2], "text_2": TEXTS[2:]})
    assert np.allclose(_scores(one_to_all), vectors @ vectors[0], atol=1e-5)
    assert np.allclose(_scores(pairs), (vectors[:2] * vectors[2:]).sum(1), atol=1e-5)
    assert _scores(one_to_all)[0] == pytest.approx(1, abs=1e-6)
    assert one_to_all["object"] == "list"
    assert [one["index"] for one in one_to_all["data"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_in_the_order_of_their_scores(path: str) -> None:
    query = "How is JSON written?"
    async with served(num_pages=256) as (engine, client):
        vectors = await engine.embed([query, *TEXTS])
        body = {"model": "pyhelp", "query": query, "documents": [*TEXTS[:3], {"text": TEXTS[3]}]}
        answer = await post(client, path, body)
        few = await post(client, path, body | {"top_n": 2, "return_documents": False})
        count = sum(len(engine.tokenizer.encode(one)) for one in [query, *TEXTS])
    expected = vectors[1:] @ vectors[0]
    ranked = [(one["index"], one["relevance_score"]) for one in answer["results"]]
    assert [index for index, _ in ranked] == np.argsort(-expected).tolist()
    assert np.allclose([cosine for _, cosine in ranked], np.sort(expected)[::-1], atol=1e-5)
    assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[i] for i, _ in ranked]
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert [one["index"] for one in few["results"]] == [index for index, _ in ranked[:2]]
    assert not [one for one in few["results"] if "document" in one]


async def test_a_text_that_comes_again_is_computed_once() -> None:
    async with served(num_pages=256) as (engine, client):
        body = {"model": "pyhelp", "text_1": ["json", "re"] * 8, "text_2": ["re", "json"] * 8}
        answer = await post(client, "/score", body)
        count = sum(len(engine.tokenizer.encode(one)) for one in ("json", "re"))
    assert answer["usage"]["prompt_tokens"] == count
    assert len(set(_scores(answer))) == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": [], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b", "c", "d"]}, "text_2"),
        ("/score", {"text_1": ["a"] * 3, "text_2": ["a"] * 3}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 3}, "text_2"),
        ("/rerank", {"query": "a", "documents": ["a"] * 3}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b", "c", "d"]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["x" * 9000]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "unheard_of": 1}, "unheard_of"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with served(ServerSettings(max_inputs=2), num_pages=256, max_model_len=256) as served_:
        engine, client = served_
        answer = await client.post(path, json={"model": "pyhelp"} | body)
        assert not engine.stats().pages_held_by_requests
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert "prompt" not in error["message"]


def _scores(answer: Any) -> list[float]:
    return [one["score"] for one in answer["data"]]
