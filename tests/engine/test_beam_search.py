"""Beam search as a call of an engine: its answers, its limits, its pages, and leaving it at any
time.

`tests/parity/test_beams.py` compares its beams with those of transformers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from aioserve import Engine, EngineClosedError, InvalidSamplingError, StepError
from aioserve.engine.beam_search import Beams
from aioserve.steps.page_tables import SlotPageTables
from aioserve.testing import FakeModel, expected_logprobs
from aioserve.testing.fake_model import byte_tokenizer
from tests.engine.idle import all_given_back

pytestmark = pytest.mark.asyncio

PROMPT = list(range(1, 41))


def expected_beams(prompt: list[int], width: int, eos: frozenset[int], **options: Any):
    """Run the same search on the outputs of a `FakeModel`, without an engine."""
    beams = Beams(width, end_ids=eos, **options)
    while beams.running:
        contexts = [[*prompt, *beam.token_ids, 0] for beam in beams.running]
        count = width + len(eos)
        scored = [expected_logprobs(ids, len(ids) - 1, top=count)[0] for ids in contexts]
        beams.advance([each.top for each in scored])
    return beams.ended


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("width", [1, 3, 8])
async def test_beams_are_those_of_the_model_however_pages_are_shared(
    prefix_caching, page_size, width
):
    eos = frozenset(range(0, 256, 16))
    options = {"length_penalty": 0.7, "early_stopping": "never"}
    model = FakeModel(num_pages=4096 // page_size, eos_token_ids=eos)
    async with Engine(model, page_size=page_size, prefix_caching=prefix_caching) as engine:
        beams = await engine.beam_search(PROMPT, beam_width=width, max_tokens=9, **options)
        assert await all_given_back(engine)
    expected = expected_beams(PROMPT, width, eos, max_tokens=9, **options)
    assert [(b.token_ids, b.score, b.cumulative_logprob, b.finish_reason) for b in beams] == [
        (b.token_ids, b.score, b.cumulative_logprob, b.finish_reason) for b in expected
    ]
    for beam in beams:
        spelled = beam.token_ids[:-1] if beam.token_ids[-1] in eos else beam.token_ids
        assert beam.text == byte_tokenizer().decode(spelled)


def plain_search(
    prompt: list[int], width: int, ends: Callable[[list[int]], bool], penalty: float, most: int
) -> list[tuple[float, list[int]]]:
    """Return scores and ids that a search of `most` tokens finds, with 64 candidates for each
    beam."""
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        grown: list[tuple[float, list[int]]] = []
        for total, ids in running:
            (told,) = expected_logprobs([*prompt, *ids, 0], len(prompt) + len(ids), top=64)
            grown += [(total + one.logprob, [*ids, one.id]) for one in told.top]
        grown.sort(key=lambda beam: -beam[0])
        over = [(total / length**penalty, ids) for total, ids in grown[:width]]
        ended += [beam for beam in over if length == most or ends(beam[1])]
        running = [beam for beam in grown if not ends(beam[1])][:width]
    return sorted(ended, key=lambda beam: -beam[0])[:width]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(12))
async def test_stops_end_beams_and_cut_their_texts_as_in_any_answer(seed, include):
    source = random.Random(seed)
    prompt, width = [source.randrange(256) for _ in range(source.randint(1, 30))], 4
    decode, penalty = byte_tokenizer().decode, source.choice([1.0, 2.0])
    eos = frozenset(source.sample(range(256), source.choice([0, 8])))
    async with Engine(FakeModel(num_pages=512, eos_token_ids=eos)) as engine:
        free = await engine.beam_search(prompt, beam_width=width, max_tokens=10)
        # One, two or three tokens of a beam, so that it is cut.
        whole = bytes(free[0].token_ids).decode("latin-1")
        pieces = [whole[at : at + n] for n in (1, 2, 3) for at in range(len(whole) - n)]
        stops = source.sample([piece for piece in pieces if piece.isascii()] or ["a"], 1)
        # Up to 14 of them, so that few of the most likely tokens complete none.
        (told,) = expected_logprobs([*prompt, 0], len(prompt), top=64)
        likely = [chr(one.id) for one in told.top if one.id < 128]
        stops += source.choice([[chr(source.randrange(128))], likely[:14]])
        stop_ids = source.sample(range(256), source.choice([0, 6]))
        options = {
            "stop": stops,
            "stop_token_ids": stop_ids,
            "include_stop_str_in_output": include,
            "length_penalty": penalty,
            "early_stopping": "never",
        }
        beams = await engine.beam_search(prompt, beam_width=width, max_tokens=10, **options)
        assert await all_given_back(engine)

    def ends(ids: list[int]) -> bool:
        return ids[-1] in {*eos, *stop_ids} or any(stop in decode(ids) for stop in stops)

    expected = plain_search(prompt, width, ends, penalty, 10)
    assert [list(beam.token_ids) for beam in beams] == [ids for _, ids in expected]
    assert [beam.score for beam in beams] == pytest.approx([score for score, _ in expected])
    for beam in beams:
        ids = list(beam.token_ids)
        assert beam.finish_reason == ("stop" if ends(ids) else "length")
        named = ids[-1] in {*eos, *stop_ids}
        text = decode(ids if include or not named else ids[:-1])
        found = [stop for stop in stops if stop in text]
        if not found:
            assert beam.text == text
            assert beam.stop_reason == (ids[-1] if ids[-1] in stop_ids else None)
            continue
        longest = max(found, key=len)
        assert beam.stop_reason == longest
        assert text.endswith(longest)
        assert beam.text == (text if include else text[: -len(longest)])


async def test_beams_go_on_where_stops_end_the_most_likely_tokens():
    for first in range(256):
        (told,) = expected_logprobs([first, 0], 1, top=64)
        stops = [chr(one.id) for one in told.top[:2]]
        if all(stop.isascii() for stop in stops):
            break
    async with Engine(FakeModel(num_pages=256)) as engine:
        options = {"stop": stops, "length_penalty": 9.0, "early_stopping": "never"}
        beams = await engine.beam_search([first], beam_width=2, max_tokens=6, **options)

    def ends(ids: list[int]) -> bool:
        return any(chr(id) in stops for id in ids)

    expected = plain_search([first], 2, ends, 9.0, 6)
    assert [list(beam.token_ids) for beam in beams] == [ids for _, ids in expected]
    assert all(len(beam.token_ids) > 1 for beam in beams)


async def test_what_the_end_of_a_beam_makes_of_half_a_character_may_be_a_stop():
    async with Engine(FakeModel(num_pages=256)) as engine:
        beams = await engine.beam_search(PROMPT, beam_width=3, max_tokens=8, stop="\ufffd")
        free = await engine.beam_search(PROMPT, beam_width=3, max_tokens=8)
    for beam in beams:
        text = byte_tokenizer().decode(beam.token_ids)
        assert beam.text == text.split("\ufffd")[0]
        assert (beam.stop_reason == "\ufffd") == ("\ufffd" in text)
    assert any("\ufffd" in beam.text for beam in free)


async def test_a_text_will_do_and_beams_end_with_the_context():
    async with Engine(FakeModel(max_model_len=12)) as engine:
        beams = await engine.beam_search("import", beam_width=2)
        assert [len(beam.token_ids) for beam in beams] == [6, 6]
        assert beams == await engine.beam_search(list(b"import"), beam_width=2, max_tokens=50)


async def test_beams_share_the_pages_of_what_they_have_in_common():
    shared: list[tuple[int, int]] = []
    tables = SlotPageTables(1024)

    def disturb(index, plan, outcome):
        tables.take(plan)
        named = [tables.page_ids(item.slot)[: -(-item.end // 4)].tolist() for item in plan.items]
        if len(named) == 4:
            copies = sum(map(len, named))
            shared.append((len({page for pages in named for page in pages}), copies))
        return outcome

    async with Engine(FakeModel(num_pages=256, disturb=disturb), page_size=4) as engine:
        await engine.beam_search(PROMPT, beam_width=4, max_tokens=16)
        stats = engine.stats()
    assert len(shared) == 15
    # The prompt has ten pages, and each beam at most four of its own.
    assert all(pages <= 10 + 4 * 4 and copies >= 4 * 11 - 1 for pages, copies in shared)
    assert sum(pages for pages, _ in shared) < sum(copies for _, copies in shared) / 2
    # Each beam only computes tokens after its last whole page.
    assert stats.tokens_prefilled_total <= 40 + 15 * 4 * 4


async def test_leaving_a_search_ends_its_requests():
    for steps in (0, 1, 7):
        reached = asyncio.Event()

        def disturb(index, plan, outcome, steps=steps, reached=reached):
            if index >= steps:
                reached.set()
            return outcome

        slow = FakeModel(num_pages=256, step_seconds=lambda plan: 0.005, disturb=disturb)
        async with Engine(slow) as engine:
            task = asyncio.create_task(engine.beam_search(PROMPT, beam_width=4, max_tokens=100))
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await all_given_back(engine)
            after = engine.stats().steps_total
            await asyncio.sleep(0.03)
            assert engine.stats().steps_total == after


async def test_what_ends_one_of_its_requests_ends_the_search():
    def disturb(index, plan, outcome):
        if index == 5:
            raise ValueError("planted")
        return outcome

    async with Engine(FakeModel(num_pages=256, disturb=disturb)) as engine:
        with pytest.raises(StepError, match="planted"):
            await engine.beam_search(PROMPT, beam_width=4, max_tokens=100)
        assert await all_given_back(engine)
        assert len(await engine.beam_search(PROMPT, beam_width=4, max_tokens=3)) == 4
    with pytest.raises(EngineClosedError):
        await engine.beam_search(PROMPT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 0}, r"beam_width must be an int in \[1, 32\], got 0"),
        ({"beam_width": 33}, r"beam_width must be an int in \[1, 32\], got 33"),
        ({"max_tokens": 0}, "max_tokens must be an int in"),
        ({"length_penalty": 10.5}, r"length_penalty must be a number in \[-10, 10\], got 10.5"),
        ({"length_penalty": -11}, r"length_penalty must be a number in \[-10, 10\], got -11"),
        ({"early_stopping": "soon"}, "early_stopping must be a bool or 'never', got 'soon'"),
        ({"early_stopping": 1}, "early_stopping must be a bool or 'never', got 1"),
        ({"stop": 5}, "stop must be"),
        ({"stop": [""]}, r"stop\[0\] must"),
        (
            {"stop_token_ids": [256]},
            "stop_token_ids must be below the vocabulary size 256, got 256",
        ),
        ({"stop_token_ids": range(40, 61)}, "at most 3 with 61 ids that end an answer"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be a bool, got 1"),
        ({"ignore_eos": None}, "ignore_eos must be a bool, got None"),
        ({"presence_penalty": 3}, r"presence_penalty must be a number in \[-2, 2\], got 3"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number in"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens = 4, got 5"),
        ({"logit_bias": {256: 1}}, "logit_bias must be below the vocabulary size 256, got 256"),
        ({"allowed_token_ids": []}, "allowed_token_ids must"),
        ({"logits_processors": ["none"]}, r"logits_processors\[0\]: "),
        ({"beam_width": 25}, "beam_width must be at most 24 with 40 ids that end an answer"),
    ],
)
async def test_arguments_are_checked_by_name(arguments, message):
    model = FakeModel(eos_token_ids=frozenset(range(40)))
    async with Engine(model) as engine:
        with pytest.raises(InvalidSamplingError, match=message):
            await engine.beam_search(PROMPT, **arguments)
        assert engine.stats().num_waiting == 0
        most = await engine.beam_search(PROMPT, beam_width=24, max_tokens=2)
        assert len(most) == 24
        widest = await engine.beam_search(PROMPT, beam_width=32, max_tokens=1, ignore_eos=True)
        assert len(widest) == 32


@pytest.mark.parametrize(
    "argument", ["temperature", "seed", "logprobs", "structured_output", "thinking_token_budget"]
)
async def test_what_a_search_does_not_do_is_refused_by_name(argument):
    async with Engine(FakeModel()) as engine:
        other: dict[str, Any] = {argument: 1}
        with pytest.raises(TypeError, match=rf"beam_search\(\) takes no '{argument}'") as refused:
            await engine.beam_search(PROMPT, **other)
    assert "params" not in str(refused.value)


async def test_of_few_tokens_all_beams_are_found_and_of_none_it_is_said():
    async with Engine(num_pages=256) as engine:
        prompt, ids = "import os", await engine.encode("ab", add_special_tokens=False)
        allowed = sorted({*ids, *await engine.encode("(", add_special_tokens=False)})
        options: dict[str, Any] = {"max_tokens": 2, "length_penalty": 0, "ignore_eos": True}
        beams = await engine.beam_search(
            prompt, beam_width=16, allowed_token_ids=allowed, **options
        )
        every = list(product(allowed, repeat=2))
        scores = {ids: (await engine.score(prompt, ids)).logprob for ids in every}
        assert [beam.token_ids for beam in beams] == sorted(every, key=lambda ids: -scores[ids])
        assert [beam.score for beam in beams] == pytest.approx(sorted(scores.values())[::-1])
        with pytest.raises(InvalidSamplingError, match="allowed_token_ids and bad_words must"):
            await engine.beam_search(prompt, allowed_token_ids=ids, bad_words=["ab"], **options)
        assert await all_given_back(engine)


async def test_no_beam_has_a_bad_word():
    options: dict[str, Any] = {"beam_width": 4, "max_tokens": 12, "ignore_eos": True}
    async with Engine(num_pages=256) as engine:
        tokenizer = engine.tokenizer
        free = await engine.beam_search("import json", **options)
        texts = {tokenizer.token_text(id).strip() for beam in free for id in beam.token_ids}
        bad = sorted(text for text in texts if text.isalnum())[:3]
        beams = await engine.beam_search("import json", bad_words=bad, **options)
    spelled = [tuple(ids) for word in bad for ids in tokenizer.spellings(word)]

    def num_bad(ids: tuple[int, ...]) -> int:
        return sum(ids[at:][: len(one)] == one for one in spelled for at in range(len(ids)))

    assert sum(num_bad(beam.token_ids) for beam in free)
    assert [len(beam.token_ids) for beam in beams] == [12] * 4
    assert not sum(num_bad(beam.token_ids) for beam in beams)
