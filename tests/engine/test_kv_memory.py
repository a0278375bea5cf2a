"""KV memory as an engine's caller sees it: its options, tenants, numbers and dump."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioserve import Completion, Engine, SamplingParams
from aioserve.testing.fake_model import FakeModel, expected_tokens
from tests.engine.idle import all_given_back

pytestmark = pytest.mark.asyncio

PROMPT = [7 * i % 251 for i in range(64)]
SHORT = SamplingParams(max_tokens=10, seed=0)


def engine(**options: Any) -> Engine:
    model = FakeModel(num_pages=256, max_model_len=1200, step_seconds=lambda plan: 0.001)
    return Engine(model, **options)


async def cached_by(engine: Engine, prompt: list[int], **request: Any) -> int:
    """Return the prompt tokens that come from the cache, and check the answer."""
    before = engine.stats()
    answer = await engine.generate(prompt, SHORT, **request)
    assert list(answer.token_ids) == expected_tokens(prompt, 10)
    after = engine.stats()
    cached = after.tokens_cached_total - before.tokens_cached_total
    assert after.tokens_prefilled_total - before.tokens_prefilled_total == len(prompt) - cached
    return cached


# -- tenants


async def test_two_salts_never_share():
    async with engine() as it:
        for salt in (None, "a", "b", "ab", "None"):
            assert await cached_by(it, PROMPT, cache_salt=salt) == 0
        for salt in (None, "a", "b", "ab", "None"):
            assert await cached_by(it, PROMPT, cache_salt=salt) == 63


async def test_salts_keep_apart_what_is_planned_in_one_step_too():
    async with engine() as it:
        salts = ["a", "b", "a", "b", None]
        answers: list[Completion] = await asyncio.gather(
            *(it.generate(PROMPT, SHORT, cache_salt=salt) for salt in salts)
        )
        assert {answer.token_ids for answer in answers} == {tuple(expected_tokens(PROMPT, 10))}
        # The second of each pair finds three full pages; the fourth page is still being written.
        assert it.stats().tokens_cached_total == 2 * 48


async def test_a_text_has_its_salt_too_when_it_is_encoded_in_a_thread():
    text = "prefix " * 100
    async with engine() as it:
        for salt in ("a", "b"):
            await it.generate(text, SHORT, cache_salt=salt)
        assert it.stats().tokens_cached_total == 0
        await it.generate(text, SHORT, cache_salt="b")
        assert it.stats().tokens_cached_total == 699


# -- options


async def test_without_a_prefix_cache_everything_is_computed():
    async with engine(prefix_caching=False) as it:
        for _ in range(2):
            assert await cached_by(it, PROMPT) == 0
        assert it.stats().pages_cached == 0
        assert it.dump()["prefix_tree"] is None


async def test_without_partial_page_reuse_whole_pages_are_shared():
    async with engine(partial_page_reuse=False) as it:
        assert [await cached_by(it, PROMPT) for _ in range(2)] == [0, 48]
        assert it.stats().pages_copied_total == 0
    async with engine() as it:
        assert [await cached_by(it, PROMPT) for _ in range(2)] == [0, 63]
        assert it.stats().pages_copied_total == 1


@pytest.mark.parametrize(("eviction", "stays"), [("lru", "first"), ("fifo", "second")])
async def test_the_eviction_strategy_says_which_prompt_stays(eviction, stays):
    first, second, third = ([i] * 33 for i in (1, 2, 3))
    one_token = SamplingParams(max_tokens=1, seed=0)
    async with engine(num_pages=5, output_reserve_tokens=0, eviction=eviction) as it:
        for prompt in (first, second, first, third):
            await it.generate(prompt, one_token)
        kept = {"first": first, "second": second}[stays]
        before = it.stats().tokens_cached_total
        await it.generate(kept, one_token)
        assert it.stats().tokens_cached_total - before == 32


async def test_what_is_evicted_comes_back_from_the_host():
    async with engine(num_pages=8, num_host_pages=16, output_reserve_tokens=0) as it:
        assert await cached_by(it, PROMPT) == 0
        assert await cached_by(it, [9] * 100) == 0
        stats = it.stats()
        assert stats.pages_host_total == 16
        assert 0 < stats.pages_host_used == stats.pages_swapped_out_total
        assert await cached_by(it, PROMPT) >= 48
        stats = it.stats()
        assert 0 < stats.pages_swapped_in_total < stats.pages_swapped_out_total
        assert await all_given_back(it)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_preempted_requests_are_swapped_or_computed_again(preemption):
    options = {"num_pages": 12, "max_model_len": 128, "output_reserve_tokens": 0}
    host = {"num_host_pages": 64} if preemption == "swap" else {}
    async with engine(**options, **host, preemption=preemption, prefix_caching=False) as it:
        params = SamplingParams(max_tokens=60, seed=0)
        prompts = [[i + 1] * 40 for i in range(4)]
        answers = await asyncio.gather(*(it.generate(prompt, params) for prompt in prompts))
        assert await all_given_back(it)
        stats = it.stats()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == expected_tokens(prompt, 60)
    assert stats.preemptions_total > 0
    assert stats.pages_host_used == 0
    swapped = (stats.pages_swapped_out_total, stats.pages_swapped_in_total)
    assert all(swapped) if preemption == "swap" else swapped == (0, 0)


# -- samples


async def test_eight_samples_of_a_long_prompt_grow_memory_by_their_new_tokens_alone():
    prompt = [7 * i % 251 for i in range(1000)]
    held: list[int] = []

    def disturb(index, plan, outcome):
        held.append(it.stats().pages_held_by_requests)
        return outcome

    it = Engine(FakeModel(num_pages=256, max_model_len=1200, disturb=disturb))
    async with it:
        params = SamplingParams(max_tokens=24, seed=0, n=8)
        done = await it.generate(prompt, params)
        stats = it.stats()
    for index, sample in enumerate(done.samples):
        assert list(sample.token_ids) == expected_tokens(prompt, 24, index)
    # The 62 full pages are shared; each sample has its own for tokens 992 to 1,023.
    assert max(held) == 62 + 8 * 2
    assert stats.tokens_prefilled_total == 1000
    assert stats.tokens_cached_total == 0
    # The last sample to write to the prompt's last page needs no copy.
    assert stats.pages_copied_total == 7


# -- numbers


async def test_pages_add_up_at_any_moment():
    pages: list[set[int]] = []

    def disturb(index, plan, outcome):
        s = it.stats()
        pages.append({s.pages_free, s.pages_fenced, s.pages_cached, s.pages_held_by_requests})
        total = s.pages_free + s.pages_fenced + s.pages_cached + s.pages_held_by_requests
        assert total == s.pages_total == 20
        return outcome

    it = Engine(
        FakeModel(num_pages=20, max_model_len=120, disturb=disturb), output_reserve_tokens=0
    )
    async with it:
        params = SamplingParams(max_tokens=30, seed=0, n=2)
        for _ in range(2):
            await asyncio.gather(*(it.generate([i] * 50, params) for i in range(8)))
        stats = it.stats()
        assert await all_given_back(it)
    assert len(pages) > 60
    assert stats.pages_cached > 0
    assert stats.tokens_cached_total > 0
    assert (stats.pages_host_total, stats.pages_host_used) == (0, 0)


async def test_dump_shows_what_each_sequence_shares_and_counts_the_tree():
    async with engine() as it:
        await it.generate(PROMPT, SHORT, request_id="before")
        async with it.stream(PROMPT, SamplingParams(max_tokens=200, n=2), request_id="x") as stream:
            while stream.usage.completion_tokens < 40:
                await anext(stream)
            shown = it.dump()
            first, second = shown["sequences"]
            assert {first["request_id"], second["request_id"]} == {"x"}
            assert first["seed"] + 1 == second["seed"]
            awaited, ahead = shown["steps_in_flight"]
            assert ahead["step"] == awaited["step"] + 1
            assert (ahead["sequences"], ahead["tokens"], ahead["copies"]) == (2, 2, 0)
            assert first["cached_tokens"] == 63
            assert second["cached_tokens"] == 64
            assert first["pages"][:4] == second["pages"][:4]
            assert set(first["pages"][4:]).isdisjoint(second["pages"][4:])
            assert 4 <= first["shared_pages"] <= len(first["pages"]) - 1
            tree = shown["prefix_tree"]
            assert tree["receipts"] == 2
            assert tree["locked_pages"] == first["published_pages"] + second["published_pages"] - 4
            assert tree["pages"] == tree["locked_pages"] + tree["evictable_pages"]
        assert await all_given_back(it)
        shown = it.dump()
        assert shown["sequences"] == []
        assert shown["prefix_tree"]["receipts"] == 0
        assert shown["prefix_tree"]["evictable_pages"] == shown["stats"]["pages_cached"] > 4
