"""Calls that a server makes beside streams: batches, prompts as ids, counts of embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aioserve import (
    Engine,
    FinishReason,
    InvalidPromptError,
    InvalidRequestError,
    PromptTooLongError,
    SamplingParams,
    StreamBusyError,
)
from aioserve.engine.chat_stream import ChatStream
from aioserve.testing import FakeModel, check_invariants
from tests.engine.scripted import ScriptedModel
from tests.server.talking import ASK, HERMES, TOOLS

pytestmark = pytest.mark.asyncio
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ANSWERS = ("It rains.", f"Let me see. {CALL}", "<think>Or not")


async def test_batches_have_all_tokens_in_order_and_the_ends_that_go_with_them() -> None:
    params = SamplingParams(max_tokens=9, n=3, seed=1)
    async with Engine(FakeModel(num_pages=64)) as engine:
        plain = [token async for token in engine.stream([1, 2], params)]
        stream = engine.stream([1, 2], params)
        batched, sizes = [], []
        while batch := await stream.batch():
            batched += batch
            sizes.append(len(batch))
            ended = {i for i, reason in enumerate(stream.finish_reasons) if reason is not None}
            counts = [sum(token.sample == i for token in batched) for i in range(3)]
            assert all(counts[i] == 9 for i in ended)
        assert await stream.batch() == []
        assert sorted(batched, key=lambda one: (one.sample, one.index)) == sorted(
            plain, key=lambda one: (one.sample, one.index)
        )
        assert max(sizes) >= 3
        check_invariants(engine)


async def test_a_reader_of_batches_that_fell_behind_goes_on() -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    async with Engine(FakeModel(num_pages=64), max_buffered_tokens=4) as engine:
        stream = engine.stream([1, 2], params)
        await asyncio.sleep(0.05)
        count, sizes = 0, []
        while batch := await stream.batch():
            sizes.append(len(batch))
            count += len(batch)
        assert count == 100
        assert max(sizes) <= 8


async def test_a_batch_has_one_reader_and_cancelling_it_ends_the_request() -> None:
    async with Engine(FakeModel(num_pages=64)) as engine:
        stream = engine.stream([1, 2], SamplingParams(max_tokens=50))
        waiting = asyncio.ensure_future(stream.batch())
        await asyncio.sleep(0)
        with pytest.raises(StreamBusyError):
            await stream.batch()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert stream.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("n", [1, 3])
async def test_batches_of_chat_join_to_the_whole_answers(n: int) -> None:
    params = SamplingParams(seed=0, n=n)
    async with Engine(ScriptedModel(HERMES, *ANSWERS)) as engine:
        whole = await engine.chat(ASK, params, tools=TOOLS).completion()
        stream: ChatStream = engine.chat(ASK, params, tools=TOOLS)
        deltas, ended = [], set()
        while batch := await stream.batch():
            assert not {delta.sample for delta in batch} & ended
            deltas += batch
            ended = {i for i, reason in enumerate(stream.finish_reasons) if reason is not None}
        for sample, answer in enumerate(whole.answers):
            its = [delta for delta in deltas if delta.sample == sample]
            assert "".join([delta.content for delta in its]) == answer.content
            assert "".join([delta.reasoning for delta in its]) == answer.reasoning
            tokens = [token for delta in its for token in delta.tokens]
            assert [token.id for token in tokens] == [token.id for token in answer.tokens]
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert bool(calls) == (n == 3)


async def test_encode_gives_what_a_request_has() -> None:
    async with Engine(num_pages=64) as engine:
        for prompt in ("import os", [1, 2, 3], ASK):
            stream = engine.stream(prompt, SamplingParams(max_tokens=1))
            await stream.started()
            assert tuple(await engine.encode(prompt)) == stream.prompt_token_ids
        wrong: list[tuple[Any, dict[str, Any], type[Exception]]] = [
            ("", {}, InvalidPromptError),
            ("word " * 5000, {}, PromptTooLongError),
            (ASK, {"add_special_tokens": False}, InvalidRequestError),
            ("a", {"add_special_tokens": 1}, InvalidPromptError),
            ("a", {"tools": TOOLS}, InvalidRequestError),
        ]
        for given, options, error in wrong:
            with pytest.raises(error):
                await engine.encode(given, **options)
        assert engine.template_reads("role")
        assert not engine.template_reads("developer")
        no_name: Any
        for no_name in (3, None, "", b"role", "a" * 257):
            with pytest.raises(InvalidRequestError, match=r"name must be a str of 1 to 256.* got"):
                engine.template_reads(no_name)


async def test_embeddings_come_with_their_counts() -> None:
    async with Engine(num_pages=64) as engine:
        vectors, usage = await engine.embed_counted(["import os", "json"])
        assert np.allclose(vectors, await engine.embed(["import os", "json"]), atol=1e-5)
        count = sum(len(engine.tokenizer.encode(text)) for text in ("import os", "json"))
        assert (usage.prompt_tokens, usage.completion_tokens) == (count, 0)


async def test_batches_raise_what_ended_the_request_each_time() -> None:
    async with Engine(num_pages=64) as engine:
        stream = engine.stream("word " * 2000, SamplingParams(max_tokens=1))
        for _ in range(2):
            with pytest.raises(PromptTooLongError):
                await stream.batch()
