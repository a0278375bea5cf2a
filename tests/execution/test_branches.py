"""Branches of guesses in a runner: which wins, what it leaves in the pages, and where it was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.execution.branches import scratch_pages
from aioserve.execution.step_thread_runner import StepThreadRunner
from aioserve.kv.pages import pages_for
from aioserve.models.decoder import Decoder
from aioserve.models.loader import load_model
from aioserve.ops import KVCache, backend_named
from aioserve.request import SamplingParams
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.pages import SlotPages
from aioserve.steps.plan import (
    DRAFT_TOKEN,
    PENDING_TOKEN,
    ItemKind,
    SampleRow,
    SlotStart,
    StepPlan,
    WorkItem,
)
from tests.ops.contents import contents, fill
from tests.parity import tiny_models

MOST = 9
"""Most guesses of an item."""
NUM_SLOTS = 2
NUM_STEPS = 3
POISON = float("nan")


class Told(Drafter):
    """Makes the guesses that it is told, in the step that it is told for."""

    def __init__(self, chain: Sequence[int], branches: Sequence[Sequence[int]]) -> None:
        self.chain = [*chain]
        self.made = [[*branch] for branch in branches]

    def start(self, slot: int, sequence: DraftedSequence) -> None: ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None: ...

    def end(self, slot: int) -> None: ...

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        return self.chain

    def branches(self, slot: int, limit: int) -> Sequence[Sequence[int]]:
        assert limit == MOST - len(self.chain)
        return self.made


@dataclass
class Ran:
    token_ids: list[int]
    outcomes: list[StepOutcome]
    cache: KVCache
    written: torch.Tensor
    """KV of the positions that are known to be computed, layers and groups first."""


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model, and one whose layers are in several groups, of which some have windows."""
    path: Path = tmp_path_factory.mktemp("model")
    tiny_models.write(request.param, path)
    return load_model(path, backend=backend_named("native"))


async def run(
    decoder: Decoder,
    prompt: Sequence[int],
    page_size: int,
    temperature: float,
    told: Told | None = None,
    *,
    count: int = MOST + 2,
    spare: int | None = None,
) -> Ran:
    """The prompt, then a step with guesses if there are any, then one by one: `count` in all."""
    groups = decoder.layout.num_groups
    each = pages_for(len(prompt) + count + MOST + 1, page_size)
    scratch = scratch_pages(4, MOST, 1, page_size, groups) if spare is None else spare
    cache = decoder.new_cache(2 * each * groups + scratch, page_size)
    fill(cache, torch.full_like(contents(cache), POISON))
    runner = StepThreadRunner(
        decoder, cache, num_slots=NUM_SLOTS, name="test", max_branches=4, scratch_pages=scratch
    )
    if told is not None:
        runner.take_drafter(told)
    # Not in order, so that a page that is mistaken for another shows.
    table = np.random.default_rng(0).permutation(2 * each * groups)[: each * groups]
    table = table.astype(np.int32)
    drafting = DraftedSequence(known_ids=np.array(prompt, np.int32), prompt_tokens=len(prompt))
    start = SlotStart(
        slot=0,
        params=SamplingParams(temperature=temperature),
        seed=7,
        prompt_tokens=len(prompt),
        drafting=drafting,
    )
    row = (SampleRow(offset=len(prompt) - 1, slot=0),)
    ids = np.array(prompt, np.int32)
    item = WorkItem(ItemKind.PREFILL, 0, 0, 0, len(ids), ids, row)
    outcomes = [
        await runner.launch(
            StepPlan(step=0, started_slots=(start,), pages=(SlotPages(0, 0, table),), items=(item,))
        )
    ]
    known = [*prompt, *outcomes[0].token_ids]
    while len(known) < len(prompt) + count:
        guesses = MOST if told is not None and len(outcomes) == 1 else 0
        ids = np.array([PENDING_TOKEN] + [DRAFT_TOKEN] * guesses, np.int32)
        item = WorkItem(
            ItemKind.VERIFY, 0, 0, len(known) - 1, len(ids), ids, (SampleRow(offset=0, slot=0),)
        )
        outcomes.append(await runner.launch(StepPlan(step=len(outcomes), items=(item,))))
        known += outcomes[-1].token_ids
    await runner.aclose()
    pages = table.reshape(-1, groups).T  # of each group in order of position
    held = contents(cache)[:, :, torch.from_numpy(pages.copy()).long()]
    # [layers, 2, groups, pages, heads, page_size, dim] -> positions behind groups
    held = held.transpose(4, 5).flatten(3, 4)
    return Ran(known, outcomes, cache, held[:, :, :, : len(known) - 1])


def wrong(token_id: int) -> int:
    return (token_id + 1) % tiny_models.VOCAB_SIZE


def path(coming: Sequence[int], right: int, length: int) -> list[int]:
    """So many right guesses, and then wrong ones."""
    return [token if at < right else wrong(token) for at, token in enumerate(coming[:length])]


@given(
    data=st.data(),
    prompt_tokens=st.integers(1, 20),
    page_size=st.sampled_from([1, 2, 4, 16]),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=25)
def test_tokens_and_pages_are_as_without_guesses(
    decoder: Decoder, data: st.DataObject, prompt_tokens: int, page_size: int, temperature: float
) -> None:
    prompt = [*range(5, 5 + prompt_tokens)]
    plain = asyncio.run(run(decoder, prompt, page_size, temperature))
    coming = plain.token_ids[prompt_tokens + 1 :]
    left, paths = MOST, list[list[int]]()
    while left > bool(paths) and len(paths) < 4:
        length = data.draw(st.integers(0 if not paths else 1, left - bool(paths)))
        paths.append(path(coming, data.draw(st.integers(0, length)), length))
        left -= length + (len(paths) > 1)
    chain, *branches = paths
    told = Told(chain, branches)
    found = asyncio.run(run(decoder, prompt, page_size, temperature, told))
    size = len(plain.token_ids)
    assert found.token_ids[:size] == plain.token_ids
    assert torch.equal(found.written[:, :, :, : size - 1], plain.written)

    outcome = found.outcomes[1]
    right = [next((n for n, t in enumerate(p) if t != coming[n]), len(p)) for p in paths]
    assert len(outcome.token_ids) == 1 + max(right)
    assert outcome.drafted.get(0, 0) == max(map(len, paths))
    rows = len(chain) + sum(1 + len(branch) for branch in branches)
    assert outcome.drafted.get(0, 0) + outcome.branched.get(0, 0) == rows


def test_branches_without_room_are_left_out(decoder: Decoder) -> None:
    prompt = [*range(5, 12)]
    plain = asyncio.run(run(decoder, prompt, 4, 0.0))
    coming = plain.token_ids[len(prompt) + 1 :]
    told = Told([wrong(coming[0])], [coming[:4]])
    groups = decoder.layout.num_groups
    for spare, tokens in ((3 * groups - 1, 5), (2 * groups, 5), (2 * groups - 1, 1), (0, 1)):
        found = asyncio.run(run(decoder, prompt, 4, 0.0, told, spare=spare))
        assert len(found.outcomes[1].token_ids) == tokens
        assert found.outcomes[1].branched == ({0: 2} if tokens == 5 else {})
        assert found.token_ids[: len(plain.token_ids)] == plain.token_ids


def test_a_step_leaves_other_pages_alone(decoder: Decoder) -> None:
    prompt = [*range(5, 12)]
    plain = asyncio.run(run(decoder, prompt, 4, 0.0))
    coming = plain.token_ids[len(prompt) + 1 :]
    found = asyncio.run(run(decoder, prompt, 4, 0.0, Told([wrong(coming[0])], [coming[:6]])))
    pool = found.cache.num_pages - scratch_pages(4, MOST, 1, 4, decoder.layout.num_groups)
    touched = (~contents(found.cache).isnan()).flatten(3).any(-1).any(1).any(0)
    expected = (~contents(plain.cache).isnan()).flatten(3).any(-1).any(1).any(0)
    assert not (touched[:pool] & ~expected[:pool]).any()
    assert touched[pool:].any()
