"""Texts of completions, streamed and whole, compared with a plain decode and search.

Vocabularies are drawn, with pieces that begin and end in the middle of emoji and CJK characters. So
are the stop strings, stop ids, end-of-sequence ids and lengths that end the completions, which
often come together.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Completion, Engine, SamplingParams, Token
from aioserve.execution.runner import LoadedModel
from aioserve.testing import FakeModel, expected_tokens, run_simulated
from aioserve.text.assembler import TextAssembler
from tests.engine.idle import all_given_back
from tests.text.plain_answers import byte_level, plain_answer, stops_of, vocabularies
from tests.tiers import examples

PROMPT = [1, 2, 3]
MAX_TOKENS = 24


class ModelOf(FakeModel):
    """A `FakeModel` with another spelling of its ids."""

    def __init__(self, vocabulary: list[bytes], eos_token_ids: frozenset[int]) -> None:
        super().__init__(eos_token_ids=eos_token_ids)
        self._vocabulary = vocabulary

    async def load(self, *args: Any, **options: Any) -> LoadedModel:
        loaded = await super().load(*args, **options)
        return msgspec.structs.replace(loaded, tokenizer=byte_level(self._vocabulary))


def decoded(vocabulary: list[bytes], ids: list[int]) -> str:
    return b"".join(vocabulary[i] for i in ids).decode(errors="replace")


@st.composite
def endings(
    draw: st.DrawFn, vocabulary: list[bytes], ids: list[int]
) -> tuple[SamplingParams, frozenset[int]]:
    """Parameters, and the ids that end the model's sequences. None of these is among the first
    `min_tokens` ids that a `FakeModel` draws."""
    lengths = range(1, MAX_TOKENS + 1)
    split = [count for count in lengths if decoded(vocabulary, ids[:count])[-1] == "\ufffd"]
    max_tokens = draw(st.sampled_from([*lengths, *3 * split]))
    text = decoded(vocabulary, ids[:max_tokens])
    min_tokens = draw(st.sampled_from([0, max_tokens, draw(st.integers(0, max_tokens))]))
    late = sorted(set(ids[min_tokens:]) - set(ids[:min_tokens]))
    some = st.lists(st.sampled_from(late), max_size=2) if late else st.just([])
    eos = frozenset(draw(some))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=0,
        stop=draw(stops_of(text)),
        stop_token_ids=draw(some),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        logprobs=0,
    )
    return params, eos


async def served(
    vocabulary: list[bytes], params: SamplingParams, eos: frozenset[int]
) -> tuple[list[Token], Any, Completion]:
    async with Engine(ModelOf(vocabulary, eos)) as engine:
        async with engine.stream(PROMPT, params) as stream:
            tokens = [token async for token in stream]
        completion = await engine.generate(PROMPT, params)
        assert await all_given_back(engine)
    return tokens, stream, completion


@settings(max_examples=examples(60))
@given(vocabulary=vocabularies(), data=st.data())
def test_streamed_and_whole_answers_are_the_decoded_text_up_to_the_first_end(vocabulary, data):
    ids = expected_tokens(PROMPT, MAX_TOKENS)
    assert byte_level(vocabulary).decode(ids) == decoded(vocabulary, ids)
    params, eos = data.draw(endings(vocabulary, ids))
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    count, text, reason, stop_reason = plain_answer(vocabulary, ids, params, end_ids)

    tokens, stream, completion = run_simulated(lambda: served(vocabulary, params, eos), seed=0)
    assert [token.id for token in tokens] == ids[:count]
    assert [token.index for token in tokens] == list(range(count))
    assert "".join(token.text for token in tokens) == text
    assert (stream.finish_reason, stream.stop_reason) == (reason, stop_reason)

    assert completion.text == text
    assert list(completion.token_ids) == ids[:count]
    assert (completion.finish_reason, completion.stop_reason) == (reason, stop_reason)
    assert completion.logprobs is not None
    assert [each.logprob for each in completion.logprobs] == [token.logprob for token in tokens]


@settings(max_examples=examples(200))
@given(vocabulary=vocabularies(), data=st.data())
def test_any_ids_with_any_ends_give_the_plain_text(vocabulary, data):
    ids = data.draw(st.lists(st.integers(0, 255), min_size=MAX_TOKENS, max_size=MAX_TOKENS))
    params, eos = data.draw(endings(vocabulary, ids))
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    assembler = TextAssembler(byte_level(vocabulary), params)
    pushed, count, stopped = "", 0, False
    for token_id in ids[: params.max_tokens]:
        count += 1
        is_end = token_id in end_ids
        more, stopped = assembler.push(token_id, is_end=is_end)
        pushed += more
        if stopped or is_end:
            break
    pushed += assembler.finish()
    expected = plain_answer(vocabulary, ids, params, end_ids)
    assert (count, pushed) == expected[:2]
    assert assembler.matched_stop == (expected[3] if isinstance(expected[3], str) else None)


def test_a_stop_that_only_the_end_of_the_answer_completes_is_why_it_ended():
    ids = expected_tokens(PROMPT, 3)
    vocabulary = [bytes([byte]) for byte in range(256)]
    vocabulary[ids[0]], vocabulary[ids[1]], vocabulary[ids[2]] = b"oo", b"kk", "🙂".encode()[:2]
    params = SamplingParams(max_tokens=3, seed=0, stop="k\ufffd")
    _, stream, completion = run_simulated(lambda: served(vocabulary, params, frozenset()), seed=0)
    assert completion.text == "ook"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "k\ufffd")
    assert (stream.finish_reason, stream.stop_reason) == ("stop", "k\ufffd")
