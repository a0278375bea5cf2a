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
        coded = await post(client, PATH, body | {"encoding_format": "base64"})
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


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[10**6]]}, "input"),
        ({"dimensions": 3}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"input": ["a", "b", "c"]}, "input"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
async def test_what_is_wrong_is_named(change: Any, param: str) -> None:
    async with served(ServerSettings(max_prompts=2), num_pages=256) as (_, client):
        answer = await client.post(PATH, json=BODY | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "prompts" not in answer.json()["error"]["message"]
