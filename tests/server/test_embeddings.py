"""`/v1/embeddings`, over a real socket."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from aioserve.server import ServerSettings
from tests.server.serving import served
from tests.server.talking import post

pytestmark = pytest.mark.asyncio
PATH = "/v1/embeddings"
BODY: dict[str, Any] = {"model": "pyhelp", "input": ["json", "a regular expression"]}


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("normalize", [False, True])
async def test_vectors_are_those_of_the_engine(pooling: Any, normalize: bool) -> None:
    async with served(num_pages=256) as (engine, client):
        body = BODY | {"pooling": pooling, "normalize": normalize}
        answer = await post(client, PATH, body)
        coded = await post(client, PATH, body | {"encoding_format": "base64", "stream": False})
        expected = await engine.embed(BODY["input"], pooling=pooling, normalize=normalize)
        count = sum(len(engine.tokenizer.encode(one)) for one in BODY["input"])
    assert [one["index"] for one in answer["data"]] == [0, 1]
    vectors = np.array([one["embedding"] for one in answer["data"]], np.float32)
    assert np.allclose(vectors, expected, atol=1e-5)
    raw = [base64.b64decode(one["embedding"]) for one in coded["data"]]
    assert np.allclose([np.frombuffer(one, "<f4") for one in raw], expected, atol=1e-5)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}


async def test_a_text_and_ids_are_one_input_each() -> None:
    async with served(num_pages=256) as (engine, client):
        ids = engine.tokenizer.encode("json")
        for one in ("json", ids, [ids]):
            answer = await post(client, PATH, BODY | {"input": one})
            assert len(answer["data"]) == 1
            size = len(answer["data"][0]["embedding"])
        await post(client, PATH, BODY | {"dimensions": size})


@pytest.mark.parametrize("normalize", [False, True])
async def test_the_first_dimensions_are_told_and_normalized_again(normalize: bool) -> None:
    async with served(num_pages=256) as (_, client):
        body = BODY | {"normalize": normalize}
        whole = _vectors(await post(client, PATH, body | {"normalize": False}))
        first = _vectors(await post(client, PATH, body | {"dimensions": 5}))
    expected = whole[:, :5]
    if normalize:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.allclose(first, expected, atol=1e-5)


async def test_a_conversation_is_embedded_as_its_template_frames_it() -> None:
    messages = [{"role": "user", "content": "How is JSON read?"}]
    async with served(num_pages=256) as (engine, client):
        answer = await post(client, PATH, {"model": "pyhelp", "messages": messages})
        ids = await engine.encode(messages, add_generation_prompt=False)
        expected = await engine.embed([ids])
        asked = {"model": "pyhelp", "messages": messages, "add_generation_prompt": True}
        other = await post(client, PATH, asked)
    assert np.allclose(_vectors(answer), expected, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == len(ids) < other["usage"]["prompt_tokens"]


def _vectors(answer: Any) -> np.ndarray[Any, Any]:
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[10**6]]}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 10**6}, "dimensions"),
        ({"messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"input": None}, "input"),
        ({"input": None, "messages": []}, "messages"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"pooling": "max"}, "pooling"),
        ({"input": ["a", "b", "c"]}, "input"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
async def test_what_is_wrong_is_named(change: Any, param: str) -> None:
    async with served(ServerSettings(max_inputs=2), num_pages=256) as (_, client):
        answer = await client.post(PATH, json=BODY | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "prompts" not in answer.json()["error"]["message"]


async def test_pooling_tells_vectors_as_they_are() -> None:
    async with served(num_pages=256) as (engine, client):
        body = BODY | {"task": "embed", "pooling": "mean"}
        plain = await post(client, "/pooling", body)
        unit = await post(client, "/pooling", body | {"normalize": True})
        coded = await post(client, "/pooling", body | {"encoding_format": "base64"})
        first = await post(client, "/pooling", body | {"dimensions": 3})
        expected = await engine.embed(BODY["input"], pooling="mean", normalize=False)
        embedded = await engine.embed(BODY["input"], pooling="mean")
        tokens = await client.post("/pooling", json=BODY | {"task": "token_embed"})
    assert [(one["object"], one["index"]) for one in plain["data"]] == [
        ("pooling", 0),
        ("pooling", 1),
    ]
    assert np.allclose([one["data"] for one in plain["data"]], expected, atol=1e-4)
    assert np.allclose([one["data"] for one in unit["data"]], embedded, atol=1e-5)
    assert np.allclose([one["data"] for one in first["data"]], expected[:, :3], atol=1e-4)
    raw = [np.frombuffer(base64.b64decode(one["data"]), "<f4") for one in coded["data"]]
    assert np.allclose(raw, expected, atol=1e-4)
    assert plain["id"].startswith("pool-")
    assert (tokens.status_code, tokens.json()["error"]["param"]) == (400, "task")
