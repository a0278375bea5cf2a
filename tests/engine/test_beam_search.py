"""Beam search as a call of an engine: its answers, its limits, its pages, and its end at any time.

That its beams are those of transformers is said in `tests/parity/test_beams.py`.
"""

from __future__ import annotations

import asyncio
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
    """The same search over what a `FakeModel` gives, without an engine."""
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
    # The prompt's ten pages, and at most four of its own for each beam.
    assert all(pages <= 10 + 4 * 4 and copies >= 4 * 11 - 1 for pages, copies in shared)
    assert sum(pages for pages, _ in shared) < sum(copies for _, copies in shared) / 2
    # Of each beam what follows its last whole page is computed.
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
        ({"ignore_eos": None}, "ignore_eos must be a bool, got None"),
        ({"beam_width": 25}, "beam_width must be at most 24 with 40 end-of-sequence ids"),
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
