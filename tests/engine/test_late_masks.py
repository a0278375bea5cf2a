"""Masks come while their step is computed. Constrained streams are planned like any others, and
hold up no other."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from aioserve import Engine, SamplingParams, TokenStream
from aioserve.engine import grammar_guides
from aioserve.engine.constrained import ConstrainedCompletion, Guide
from aioserve.sampling import masks as late_masks
from aioserve.sampling.masks import LateMasks
from aioserve.structured_output import StructuredOutput
from tests.waits import LIMIT_SECONDS

FORM = SamplingParams(
    temperature=1.0, seed=9, max_tokens=400, structured_output=StructuredOutput(regex="[a-z]{4000}")
)
SHORT = msgspec.structs.replace(FORM, max_tokens=20)
WORDS = 3


def plain(seed: int, count: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, ignore_eos=True, max_tokens=count)


async def tokens_of(stream: TokenStream) -> list[int]:
    return [token.id async for token in stream]


def mask(*token_ids: int) -> np.ndarray:
    bits = np.zeros(WORDS, np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    return bits.view(np.int32)


def found(masks: LateMasks) -> dict[int, list[int]]:
    return {row: each.tolist() for row, each in masks.found(0)}


def test_masks_are_brought_by_position() -> None:
    answer, steps = ConstrainedCompletion(5), [LateMasks([0]) for _ in range(5)]
    answer.expect(5, steps[0], 0)
    answer.add_guide(Guide((), mask(1)))
    answer.expect(6, steps[1], 0)
    answer.expect(7, steps[2], 0)
    assert found(steps[0]) == {0: mask(1).tolist()}
    answer.add_guide(Guide((40,), mask(2, 33)))  # the token at 5 is known, and 40 follows it
    assert found(steps[1]) == {0: mask(40).tolist()}
    assert found(steps[2]) == {0: mask(2, 33).tolist()}
    answer.expect(7, steps[3], 0)  # once more, after a preemption
    assert found(steps[3]) == {0: mask(2, 33).tolist()}
    answer.expect(8, steps[4], 0)
    answer.ended()
    assert (found(steps[4]), steps[4].late) == ({}, frozenset())


def test_what_has_not_come_when_it_is_looked_for_is_late() -> None:
    masks = LateMasks([1, 4])
    masks.bring(4, mask(3))
    masks.bring(7, mask(3))
    assert masks.late is None
    assert found(masks) == {4: mask(3).tolist()}
    masks.bring(1, mask(2))
    assert found(masks) == {4: mask(3).tolist()}
    assert masks.late == {1}


@pytest.mark.asyncio
async def test_a_stream_with_a_form_is_in_the_steps_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_masks, "WAIT_SECONDS", 10.0)  # however busy the machine is
    async with Engine("pyhelp") as engine:
        constrained = engine.stream([1, 2, 3], FORM)
        for _ in range(4):
            await anext(constrained)
        reading = asyncio.ensure_future(tokens_of(constrained))
        before, steps = constrained.usage.completion_tokens, engine.stats().steps_total
        await asyncio.gather(
            *(tokens_of(engine.stream([1, 2, i], plain(i, 150))) for i in range(4))
        )
        gained = constrained.usage.completion_tokens - before
        share = gained / (engine.stats().steps_total - steps)
        constrained.close()
        reading.cancel()
    assert share >= 0.97


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 1}, {"num_pages": 4, "max_model_len": 64}]
)
async def test_others_go_on_while_a_grammar_takes_its_time(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    go_on, after = threading.Event(), grammar_guides._after
    asked = threading.Event()

    def stuck(*step: Any) -> Guide:
        asked.set()
        go_on.wait(LIMIT_SECONDS)
        return after(*step)

    form = SamplingParams(
        temperature=0.0, structured_output=StructuredOutput(regex="[a-z]{20}"), max_tokens=30
    )
    async with Engine("pyhelp", **options) as engine:
        expected = await engine.generate([1, 2, 3], form)
        alone = [await engine.generate([1, 2, i], plain(i, 40)) for i in range(3)]
        monkeypatch.setattr(grammar_guides, "_after", stuck)
        constrained = asyncio.ensure_future(engine.generate([1, 2, 3], form))
        assert await asyncio.to_thread(asked.wait, LIMIT_SECONDS)
        beside = [await engine.generate([1, 2, i], plain(i, 40)) for i in range(3)]
        assert not constrained.done()
        go_on.set()
        answer = await constrained
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]
    assert answer.token_ids == expected.token_ids


@pytest.mark.asyncio
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_masks_that_are_sometimes_late_change_no_token(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, prefix_caching: bool
) -> None:
    monkeypatch.setattr(late_masks, "WAIT_SECONDS", 0.0)
    slow = grammar_guides._after
    calls = 0

    def sometimes_slow(*step: Any) -> Guide:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            time.sleep(0.02)
        return slow(*step)

    form = StructuredOutput(json_schema={"type": "array", "items": {"type": "integer"}})
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, structured_output=form)
        for i in range(3)
    ]
    async with Engine("pyhelp", overlap=overlap, jump_forward=False) as engine:
        expected = [await engine.generate([1, 2, 3], one) for one in params]
    monkeypatch.setattr(grammar_guides, "_after", sometimes_slow)
    async with Engine("pyhelp", overlap=overlap, prefix_caching=prefix_caching) as engine:
        answers = await asyncio.gather(
            *(engine.generate([1, 2, 3], one) for one in params),
            engine.generate([4], plain(4, 60)),
        )
        prefilled = engine.stats().tokens_prefilled_total
    assert [one.token_ids for one in answers[:3]] == [one.token_ids for one in expected]
    if not prefix_caching:  # no prompt is computed again
        assert prefilled == 3 * 3 + 1


@pytest.mark.asyncio
async def test_no_step_waits_for_the_mask_of_a_row_that_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mask of the second token comes late. The next step in flight would wait for the mask
    of the third, which needs the second token."""
    monkeypatch.setattr(late_masks, "WAIT_SECONDS", 2 * LIMIT_SECONDS)
    is_late = threading.Event()
    num_steps = 0
    advance, look = grammar_guides._advance, LateMasks.found

    def held(steps: Any) -> list[Guide]:
        assert is_late.wait(LIMIT_SECONDS)  # the first to come is for the second token
        return advance(steps)

    def looked(masks: LateMasks) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps != 2:
            return look(masks)
        brought = look(masks, 0)
        is_late.set()
        return brought

    monkeypatch.setattr(grammar_guides, "_advance", held)
    monkeypatch.setattr(LateMasks, "found", looked)
    async with Engine("pyhelp", overlap=True) as engine:
        tokens = await tokens_of(engine.stream([1, 2, 3], SHORT))
    assert len(tokens) == 20
    assert is_late.is_set()
