"""Prompts that are cut: which tokens are left, of texts, ids and messages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from aioserve import Engine, InvalidRequestError, PromptTooLongError, SamplingParams
from aioserve.assets import model_path
from aioserve.engine.truncation import Truncation
from aioserve.testing.fake_model import FakeModel
from tests.engine.scripted import ScriptedModel

pytestmark = pytest.mark.asyncio

ONE = SamplingParams(max_tokens=1)
MAX_MODEL_LEN = 64
TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def engine() -> Engine:
    return Engine(FakeModel(num_pages=256, max_model_len=MAX_MODEL_LEN))


async def ids_of(it: Engine, prompt: Any, params: SamplingParams = ONE, **options: Any) -> Any:
    async with it.stream(prompt, params, **options) as stream:
        async for _ in stream:
            pass
        return list(stream.prompt_token_ids)


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from(["left", "right"]),
    st.integers(0, 2),
    st.integers(0, 2),
)
async def test_the_frame_stays_and_one_side_goes(
    own: list[int], most: int, side: Any, before: int, after: int
) -> None:
    framed = [100] * before + own + [200] * after
    cut = Truncation(most, side, 100)
    if len(framed) > most <= before + after:
        with pytest.raises(InvalidRequestError, match=f"at least {before + after + 1}"):
            cut.cut(framed, (before, after))
        return
    room = most - before - after
    left = own if len(framed) <= most else own[-room:] if side == "left" else own[:room]
    expected = [100] * before + left + [200] * after
    assert cut.cut(framed, (before, after)) == expected
    array = cut.cut(np.array(framed, np.int32), (before, after))
    assert (array.dtype, array.tolist()) == (np.int32, expected)


async def test_texts_and_ids_are_cut_alike() -> None:
    text = "abcdefghij" * 20
    ids = list(text.encode())
    async with engine() as it:
        for prompt in (text, ids, np.array(ids)):
            assert await ids_of(it, prompt, truncate_prompt_tokens=5) == ids[-5:]
            right = {"truncate_prompt_tokens": 5, "truncation_side": "right"}
            assert await ids_of(it, prompt, **right) == ids[:5]
            room = MAX_MODEL_LEN - 1
            assert await ids_of(it, prompt, truncate_prompt_tokens=-1) == ids[-room:]
            ten = SamplingParams(max_tokens=10)
            assert await ids_of(it, prompt, ten, truncate_prompt_tokens=-1) == ids[-54:]
            with pytest.raises(PromptTooLongError):
                await ids_of(it, prompt)
            assert await it.encode(prompt, **right) == ids[:5]
            assert await it.encode(prompt, truncate_prompt_tokens=-1) == ids[-room:]
        bare = {"add_special_tokens": False, "truncate_prompt_tokens": 2}
        assert await it.encode("abc", **bare) == list(b"bc")
        assert await ids_of(it, "abc", truncate_prompt_tokens=3) == list(b"abc")
        cut = await it.generate(
            text, SamplingParams(max_tokens=8, seed=3), truncate_prompt_tokens=9
        )
        plain = await it.generate(ids[-9:], SamplingParams(max_tokens=8, seed=3))
        assert (cut.token_ids, cut.usage.prompt_tokens) == (plain.token_ids, 9)
        vectors = await it.embed([text, "xy"], truncate_prompt_tokens=7, truncation_side="right")
        assert np.array_equal(vectors, await it.embed([ids[:7], "xy"]))


async def test_messages_are_cut_when_they_are_rendered() -> None:
    async with Engine(ScriptedModel(TURNS, "Rain.")) as it:
        messages = [{"role": "user", "content": "What's the weather in Oslo?"}]
        whole = await it.encode(messages)
        assert await it.encode(messages, truncate_prompt_tokens=4) == whole[-4:]
        async with it.chat(messages, SamplingParams(seed=0), truncate_prompt_tokens=4) as stream:
            done = await stream.completion()
            assert list(stream.prompt_token_ids) == whole[-4:]
    assert (done.content, done.usage.prompt_tokens) == ("Rain.", 4)


async def test_the_frame_of_the_models_tokenizer_stays(tmp_path: Path) -> None:
    model = tmp_path / "framed"
    shutil.copytree(model_path("pyhelp") or "", model)
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    names = ("<|im_start|>", "<|im_end|>")
    marks = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=marks
    )
    backend.save(str(model / "tokenizer.json"))
    text = "import json, os, re"
    async with Engine(model) as it:
        assert it.tokenizer.frame == (1, 1)
        first, *own, last = await it.encode(text)
        assert [first, last] == [token_id for _, token_id in marks]
        cut: dict[str, Any] = {"truncate_prompt_tokens": 5}
        assert await ids_of(it, text, ONE, **cut) == [first, *own[-3:], last]
        right = cut | {"truncation_side": "right"}
        assert await ids_of(it, text, ONE, **right) == [first, *own[:3], last]
        assert await it.encode(text, add_special_tokens=False, **cut) == own[-5:]
        with pytest.raises(InvalidRequestError, match="must be at least 3"):
            await ids_of(it, text, truncate_prompt_tokens=2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"truncate_prompt_tokens": 0}, r"truncate_prompt_tokens must be in \[1, 63\] or -1, got 0"),
    ({"truncate_prompt_tokens": -2}, r"truncate_prompt_tokens must be .* \[-1, 63\], got -2"),
    ({"truncate_prompt_tokens": 64}, r"truncate_prompt_tokens must be .* \[-1, 63\], got 64"),
    ({"truncate_prompt_tokens": 2.0}, "truncate_prompt_tokens must be an int"),
    ({"truncation_side": "middle"}, "truncation_side must be"),
]


async def test_what_is_wrong_is_named() -> None:
    async with engine() as it:
        for options, message in WRONG:
            with pytest.raises(InvalidRequestError, match=message):
                it.stream("abc", ONE, **options)
        long = SamplingParams(max_tokens=MAX_MODEL_LEN)
        with pytest.raises(InvalidRequestError, match="must be below max_model_len = 64"):
            it.stream("abc", long, truncate_prompt_tokens=-1)
        with pytest.raises(TypeError, match="truncate_prompt_tokens"):
            await it.score("a", "b", truncate_prompt_tokens=1)  # pyright: ignore[reportCallIssue]
        with pytest.raises(PromptTooLongError, match="characters"):
            it.stream("a" * (MAX_MODEL_LEN * 128 + 1), ONE, truncate_prompt_tokens=1)
