"""Vectors of texts without a model, those that a test makes included."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, RequestFailedError
from aioserve.testing import FakeModel
from aioserve.testing.embeddings import vector_of
from tests.testing.answered import served


@given(texts=st.lists(st.text(max_size=40), min_size=2, max_size=5))
def test_equal_texts_have_equal_vectors_and_others_have_others(texts):
    for one, other in itertools.product(texts, texts):
        assert (one == other) is np.allclose(vector_of(one), vector_of(other))


def test_vectors_have_length_1_however_they_are_pooled_and_whatever_runs_beside_them():
    texts = ["Rain", "Rain in Oslo " * 5, "Rain"]

    async def main(engine: Engine) -> None:
        alone = [await engine.embed(text) for text in texts]
        np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1, rtol=1e-5)
        assert np.array_equal(alone[0], alone[2])
        own = vector_of(texts[1])
        np.testing.assert_allclose(alone[1], own / np.linalg.norm(own), rtol=1e-5)
        for pooling in ("last", "mean", "cls"):
            vectors = await engine.embed(texts, pooling=pooling)
            np.testing.assert_allclose(vectors, alone, rtol=1e-5, atol=1e-6)

    served(FakeModel(answers=""), main, max_num_batched_tokens=16)


def test_texts_that_share_words_are_nearer_than_others():
    async def main(engine: Engine) -> Any:
        texts = ["How do I get a refund?", "A refund takes five days.", "We open at noon."]
        vectors = await engine.embed(texts)
        return vectors[0] @ vectors[1:].T

    near, far = served(FakeModel(answers=""), main)
    assert near > far + 0.1


def test_a_function_makes_vectors_and_what_is_none_ends_the_request():
    vectors: dict[str, Any] = {
        "a": [3, 4],
        "b": np.array([0.0, 1.0]),
        "zero": [0.0, 0.0],
        "long": [1.0, 2.0, 3.0],
        "text": "12",
        "nothing": [],
        "nan": [float("nan"), 1.0],
        "table": [[1.0]],
    }

    async def main(engine: Engine) -> None:
        both = await engine.embed(["a", "b", "zero"])
        np.testing.assert_allclose(both, [[0.6, 0.8], [0.0, 1.0], [0.0, 0.0]], atol=1e-6)
        raw = await engine.embed("a", normalize=False, pooling="mean")
        np.testing.assert_allclose(raw, [3, 4], atol=1e-6)
        for text, why in [
            ("long", "vectors of one length, got 3 numbers after 2"),
            ("text", "embeddings must give a list of finite numbers, got '12'"),
            ("nothing", r"embeddings must give a list of finite numbers, got \[\]"),
            ("nan", "embeddings must give a list of finite numbers"),
            ("table", "embeddings must give a list of finite numbers"),
            (
                "unknown",
                r"of embeddings failed in line \d+ of test_fake_embeddings.py: KeyError\('unkn",
            ),
        ]:
            with pytest.raises(RequestFailedError, match=why):
                await engine.embed(text)
        assert (await engine.embed("a")).shape == (2,)

    served(FakeModel(embeddings=lambda text: vectors[text]), main)


@pytest.mark.parametrize(
    "made",
    [
        [10**400],
        [1e300],
        [1 + 2j],
        np.array([1 + 2j]),
        ["1", "2"],
        [[1], [1, 2]],
        torch.ones(1, requires_grad=True),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_vector_ends_its_own_request_alone(made):
    async def main(engine: Engine) -> list[Any]:
        asked = [engine.embed(text) for text in ("fine", "odd", "fine")]
        return await asyncio.gather(*asked, return_exceptions=True)

    model = FakeModel(embeddings=lambda text: made if text == "odd" else [1])
    before, error, after = served(model, main)
    assert before == after == [1.0]
    assert isinstance(error, RequestFailedError)
    assert "embeddings must give a list of finite numbers" in str(error)


def test_a_function_of_embeddings_that_fails_the_test_ends_its_request():
    def vector(text: str) -> list[float]:
        if text == "odd":
            pytest.fail("asked for an odd one")
        return [1.0]

    async def main(engine: Engine) -> None:
        with pytest.raises(RequestFailedError, match="asked for an odd one"):
            await engine.embed("odd")
        assert await engine.embed("fine") == [1.0]

    served(FakeModel(embeddings=vector), main)
