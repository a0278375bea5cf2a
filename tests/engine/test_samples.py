"""Several samples of one prompt: each gets its own tokens, and they end as one request."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import pytest

from aioserve import (
    DuplicateRequestError,
    Engine,
    EngineClosedError,
    FinishReason,
    InvalidSamplingError,
    RequestFailedError,
    RequestRejectedError,
    Sample,
    SamplingParams,
    SchedulingPolicy,
    StepError,
    StreamStalledError,
    Token,
    TokenStream,
    Verdict,
)
from aioserve.testing.fake_model import FakeModel, byte_tokenizer, expected_tokens
from aioserve.text.assembler import TextAssembler
from tests.engine.idle import all_given_back
from tests.waits import until

pytestmark = pytest.mark.asyncio

PROMPT = [1, 2, 3, 4, 5]
FOUR = SamplingParams(max_tokens=20, seed=7, n=4)


def engine(eos: frozenset[int] = frozenset(), disturb=lambda i, plan, outcome: outcome, **options):
    model = FakeModel(
        num_pages=256, eos_token_ids=eos, step_seconds=lambda plan: 0.001, disturb=disturb
    )
    return Engine(model, **options)


def answer(sample: int, count: int = 20, seed: int = 7) -> list[int]:
    return expected_tokens(PROMPT, count, (seed + sample) % 2**64)


async def read(stream: TokenStream, samples: int) -> list[list[int]]:
    """Return ids by sample, checked to come in order."""
    return by_sample([token async for token in stream], samples)


def by_sample(tokens: list[Token], samples: int) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(samples)]
    for token in tokens:
        assert token.index == len(ids[token.sample])
        ids[token.sample].append(token.id)
    return ids


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 2048])
@pytest.mark.parametrize("scarce", [False, True])
async def test_sample_i_is_the_answer_of_the_seed_plus_i(overlap, page_size, chunk, scarce):
    prompts = [[i + 1] * (1 + 13 * i % 50) for i in range(4)]
    num_pages = -(-80 // page_size) if scarce else 4096 // page_size
    model = FakeModel(num_pages=num_pages, max_model_len=80)
    options = {"page_size": page_size, "max_num_batched_tokens": chunk, "overlap": overlap}
    params = SamplingParams(max_tokens=20, seed=2**64 - 2, n=5)
    async with Engine(model, output_reserve_tokens=0, **options) as it:
        answers = await asyncio.gather(*(it.generate(prompt, params) for prompt in prompts))
        assert await all_given_back(it)
    for prompt, done in zip(prompts, answers, strict=True):
        for index, sample in enumerate(done.samples):
            seed = (2**64 - 2 + index) % 2**64
            assert list(sample.token_ids) == expected_tokens(prompt, 20, seed)


async def test_without_a_seed_each_sample_still_has_its_own():
    async with engine() as it:
        done = await it.generate(PROMPT, SamplingParams(max_tokens=20, n=4))
    assert len({sample.token_ids for sample in done.samples}) == 4


async def test_a_stream_interleaves_its_samples_and_keeps_each_in_order():
    async with engine() as it:
        stream = it.stream(PROMPT, FOUR)
        first = [await anext(stream) for _ in range(8)]
        assert {token.sample for token in first} == {0, 1, 2, 3}
        tokens = first + [token async for token in stream]
        assert by_sample(tokens, 4) == [answer(index) for index in range(4)]
        assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (5, 80)
        assert stream.timings.completion_tokens == 80
        assert stream.finish_reasons == (FinishReason.LENGTH,) * 4


async def test_a_completion_holds_every_sample_and_shows_the_first():
    async with engine() as it:
        done = await it.generate(PROMPT, FOUR)
    decode = byte_tokenizer().decode
    assert done.samples == tuple(
        Sample(decode(answer(i)), tuple(answer(i)), FinishReason.LENGTH) for i in range(4)
    )
    assert (done.text, done.token_ids) == (done.samples[0].text, done.samples[0].token_ids)
    assert done.finish_reason is FinishReason.LENGTH
    assert done.usage.completion_tokens == 80


async def test_samples_end_one_by_one_and_the_request_with_the_last_of_them():
    end = answer(0)[3]
    lengths = [[*answer(index), end].index(end) + 1 for index in range(4)]
    assert lengths[0] == 4
    assert max(lengths) > 20
    async with engine(eos=frozenset({end})) as it:
        stream = it.stream(PROMPT, FOUR, request_id="one")
        while stream.finish_reasons[0] is None:
            assert stream.finish_reason is None
            await anext(stream)
        assert stream.finish_reasons[0] is FinishReason.STOP
        assert stream.finish_reason is None
        with pytest.raises(DuplicateRequestError):
            it.stream(PROMPT, request_id="one")
        assert [token async for token in stream][-1].index == 19
        assert stream.finish_reason is FinishReason.STOP
        expected = tuple("stop" if length <= 20 else "length" for length in lengths)
        assert stream.finish_reasons == expected
        assert stream.usage.completion_tokens == sum(min(length, 20) for length in lengths)


async def test_a_stop_string_ends_its_own_sample_alone():
    texts = [byte_tokenizer().decode(answer(index)) for index in range(4)]
    stop = texts[2][8:11]
    assert [stop in text for text in texts] == [False, False, True, False]
    async with engine() as it:
        params = SamplingParams(max_tokens=20, seed=7, n=4, stop=stop)
        done = await it.generate(PROMPT, params)
        assert await all_given_back(it)
    texts[2] = texts[2][: texts[2].index(stop)]
    assert [sample.text for sample in done.samples] == texts
    assert [s.finish_reason for s in done.samples] == ["length", "length", "stop", "length"]


async def test_leaving_the_stream_ends_every_sample_within_a_step():
    async with engine() as it:
        async with it.stream(PROMPT, SamplingParams(max_tokens=200, seed=0, n=4)) as stream:
            await anext(stream)
        assert await all_given_back(it)
        assert stream.finish_reasons == (FinishReason.ABORT,) * 4
        taken = stream.usage.completion_tokens
        await asyncio.sleep(0.01)
        assert stream.usage.completion_tokens == taken


async def test_a_cancelled_reader_ends_every_sample():
    async with engine() as it:
        stream = it.stream(PROMPT, SamplingParams(max_tokens=200, seed=0, n=4))
        reader = asyncio.create_task(read(stream, 4))
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await all_given_back(it)


async def test_a_stream_that_is_dropped_ends_every_sample():
    async with engine() as it:
        held = [it.stream(PROMPT, SamplingParams(max_tokens=200, seed=0, n=4))]
        await anext(held[0])
        held.clear()
        gc.collect()
        assert await all_given_back(it)


async def test_a_request_left_after_some_of_its_samples_ended_says_so():
    end = answer(0)[3]
    async with engine(eos=frozenset({end})) as it:
        async with it.stream(PROMPT, FOUR) as stream:
            while stream.finish_reasons[0] is None:
                await anext(stream)
        assert stream.finish_reasons[0] is FinishReason.STOP
        assert stream.finish_reasons[1:] == (FinishReason.ABORT,) * 3
        assert stream.finish_reason is FinishReason.ABORT
        assert await all_given_back(it)


async def test_the_end_of_the_request_stands_though_a_sample_comes_to_its_own():
    async with engine() as it:
        for taken in range(1, 9):
            stream = it.stream(PROMPT, SamplingParams(max_tokens=4, seed=7, n=2))
            for _ in range(taken):
                await anext(stream)
            stream.close()
            ended = stream.finish_reasons
            await it.generate([9], SamplingParams(max_tokens=5, seed=0))
            assert stream.finish_reasons == ended
            assert stream.finish_reason in ended


async def test_closing_the_engine_ends_every_sample():
    async with engine() as it:
        stream = it.stream(PROMPT, SamplingParams(max_tokens=200, seed=0, n=4))
        await anext(stream)
    with pytest.raises(EngineClosedError):
        await read(stream, 4)
    assert it.stats().pages_held_by_requests == it.stats().pages_fenced == 0


async def test_what_goes_wrong_in_one_sample_ends_its_request_and_no_other():
    of_seed_9 = set()

    def disturb(index, plan, outcome):
        of_seed_9.update(start.slot for start in plan.started_slots if start.seed == 9)
        rows = [(item, row) for item in plan.items for row in item.rows]
        bad = {
            index: "the logits are NaN"
            for index, (item, row) in enumerate(rows)
            if row.slot in of_seed_9 and item.start >= 10
        }
        return msgspec.structs.replace(outcome, row_errors=bad)

    async with engine(disturb=disturb) as it:
        stream = it.stream(PROMPT, FOUR)
        other = it.stream(PROMPT, SamplingParams(max_tokens=20, seed=70, n=2))
        with pytest.raises(RequestFailedError, match="NaN"):
            await read(stream, 4)
        assert stream.finish_reasons == (FinishReason.ERROR,) * 4
        assert await read(other, 2) == [answer(0, seed=70), answer(1, seed=70)]
        assert await all_given_back(it)


async def test_text_that_cannot_be_made_in_one_sample_ends_its_request(monkeypatch):
    push, bad = TextAssembler.push, answer(2)[6]

    def breaking(self, token_id, *, is_end):
        if token_id == bad:
            raise ValueError("planted")
        return push(self, token_id, is_end=is_end)

    monkeypatch.setattr(TextAssembler, "push", breaking)
    async with engine() as it:
        with pytest.raises(RequestFailedError, match="can't be turned into text: planted"):
            await it.generate(PROMPT, FOUR)
        assert await all_given_back(it)


async def test_a_failed_step_ends_the_samples_that_it_did_not_hold_too():
    def disturb(index, plan, outcome):
        if index == 8:
            assert plan.num_sequences < 4
            raise OSError("planted")
        return outcome

    async with engine(disturb=disturb, max_num_batched_tokens=1) as it:
        stream = it.stream(PROMPT, FOUR)
        with pytest.raises(StepError, match="planted"):
            await read(stream, 4)
        assert stream.finish_reason is FinishReason.ERROR
        assert await all_given_back(it)


async def test_a_request_that_the_policy_refuses_fails_once():
    class Refusing(SchedulingPolicy):
        def admit(self, request, view):
            return Verdict.NEVER

    async with engine(policy=Refusing()) as it:
        with pytest.raises(RequestRejectedError):
            await it.generate(PROMPT, FOUR)
        assert await all_given_back(it)


async def test_a_slow_reader_pauses_all_its_samples_and_loses_nothing():
    async with engine(max_buffered_tokens=8) as it:
        slow = it.stream(PROMPT, FOUR)
        await it.generate([9], SamplingParams(max_tokens=60, seed=0))
        assert slow.usage.completion_tokens <= 8 + 3 * 4
        assert await read(slow, 4) == [answer(index) for index in range(4)]


async def test_a_reader_that_takes_nothing_ends_all_its_samples():
    async with engine(max_buffered_tokens=4, stall_timeout_seconds=0.02) as it:
        stream = it.stream(PROMPT, FOUR)
        await until(lambda: stream.finish_reasons[0])
        assert await all_given_back(it)
        with pytest.raises(StreamStalledError):
            await read(stream, 4)


async def test_more_samples_than_a_step_holds_are_refused_at_once():
    async with engine(max_num_seqs=4) as it:
        with pytest.raises(InvalidSamplingError, match="n must be at most max_num_seqs = 4, got 5"):
            it.stream(PROMPT, SamplingParams(n=5))
        assert len((await it.generate(PROMPT, FOUR)).samples) == 4


class Books(SchedulingPolicy):
    """Notes arrivals and ends, in order."""

    def __init__(self) -> None:
        self.live: dict[int, str] = {}
        self.ended: list[tuple[int, str]] = []

    def arrived(self, requests):
        for request in requests:
            assert request.arrival_index not in self.live
            # The id of an ended request may be reused, and its samples share it.
            self.live[request.arrival_index] = request.request_id

    def finished(self, requests):
        for request in requests:
            assert self.live.pop(request.arrival_index) == request.request_id
            self.ended.append((request.arrival_index, request.request_id))


async def test_books_kept_by_arrival_index_survive_samples_and_ids_that_come_again():
    books = Books()
    async with Engine(FakeModel(), policy=books) as it:
        for turn in range(3):
            stream = it.stream([1, 2, 3], SamplingParams(max_tokens=9, n=3), request_id="again")
            await anext(stream)
            if turn % 2:
                stream.close()
            else:
                assert [token async for token in stream]
            del stream
        await it.drain()
    assert not books.live
    indices = [index for index, _ in books.ended]
    assert len(indices) == len(set(indices)) == 9
    assert {request_id for _, request_id in books.ended} == {"again"}


async def test_of_more_answers_the_best_are_returned_in_order():
    # Answers differ in length: ranked by sums, the short ones would win.
    eos = frozenset({answer(1)[3], answer(4)[9]})
    async with engine(eos, max_num_seqs=8) as it:
        asked = SamplingParams(max_tokens=20, seed=7, n=8, logprobs=0)
        drawn = (await it.generate(PROMPT, asked)).samples

        def mean(sample: Sample) -> float:
            assert sample.cumulative_logprob is not None
            return sample.cumulative_logprob / len(sample.token_ids)

        best = sorted(drawn, key=mean, reverse=True)
        assert best != sorted(drawn, key=lambda s: s.cumulative_logprob or 0.0, reverse=True)
        num_drawn = sum(len(sample.token_ids) for sample in drawn)
        for n in (1, 3, 8):
            params = SamplingParams(max_tokens=20, seed=7, n=n, best_of=8, logprobs=0)
            done = await it.generate(PROMPT, params)
            expected = tuple(drawn) if n == 8 else tuple(best[:n])
            assert done.samples == expected
            assert done.usage.completion_tokens == num_drawn
            unseen = msgspec.structs.replace(params, logprobs=None)
            done = await it.generate(PROMPT, unseen)
            assert [s.token_ids for s in done.samples] == [s.token_ids for s in expected]
            assert [(s.logprobs, s.cumulative_logprob) for s in done.samples] == [(None, None)] * n
        assert await all_given_back(it)


async def test_best_of_is_checked_by_name():
    with pytest.raises(InvalidSamplingError, match="best_of must be at least n = 3, got 2"):
        SamplingParams(n=3, best_of=2)
    async with engine(max_num_seqs=4) as it:
        with pytest.raises(InvalidSamplingError, match="best_of must be at most max_num_seqs = 4"):
            await it.generate(PROMPT, SamplingParams(best_of=5))
        with pytest.raises(InvalidSamplingError, match="best_of must be at most n = 1 where"):
            it.stream(PROMPT, SamplingParams(best_of=2))
        tokens = await read(it.stream(PROMPT, msgspec.structs.replace(FOUR, best_of=4)), 4)
        assert tokens == [answer(i) for i in range(4)]


async def test_alternatives_have_their_texts_in_answers_prompts_and_scores():
    params = SamplingParams(max_tokens=8, n=2, logprobs=3, prompt_logprobs=2)
    model = FakeModel(num_pages=256)
    async with Engine(model) as it:
        done = await it.generate("abc", params)
        score = await it.score("ab", "cd", top_logprobs=2)
        text_of = it.tokenizer.token_text
    places = [place for sample in done.samples for place in sample.logprobs or ()]
    places += [place for place in done.prompt_logprobs or () if place is not None]
    tops = [one for place in [*places, *score.logprobs] for one in place.top]
    assert len(tops) == 2 * 8 * 3 + 2 * 2 + 2 * 2
    assert [one.text for one in tops] == [text_of(one.id) for one in tops]
    assert any(one.text for one in tops)
