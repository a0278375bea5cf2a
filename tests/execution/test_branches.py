"""Branches of draft tokens in a runner: the winner, its KV pages, and its position."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.execution.cpu_worker import CpuWorker
from aioserve.execution.host import Host
from aioserve.execution.speculation.branches import ScratchPages, scratch_pages
from aioserve.execution.step_thread_runner import StepThreadRunner
from aioserve.models.decoder import Decoder
from aioserve.models.loader import load_model
from aioserve.ops import KVCache, backend_named
from aioserve.paging.pages import pages_for
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
from tests.tiers import examples

MOST = 9
"""Most draft tokens of an item."""
NUM_SLOTS = 3
PART_SLOT = 2
"""Slot of a prompt that the step with draft tokens computes a part of, without drawing."""
PART = [*range(40, 46)]
POISON = float("nan")


Paths = Sequence[Sequence[int]]
"""A chain, and branches."""
Table = npt.NDArray[np.int32]
TokenRows = npt.NDArray[np.int64]


class Told(Drafter):
    """Makes prescribed draft tokens for each slot, in the prescribed step."""

    def __init__(self, paths: Mapping[int, Paths]) -> None:
        self._paths = paths

    def start(self, slot: int, sequence: DraftedSequence) -> None: ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None: ...

    def end(self, slot: int) -> None: ...

    def draft(self, slot: int, limit: int) -> Sequence[int]:
        return self._paths[slot][0]

    def branches(self, slot: int, limit: int) -> Paths:
        chain, *branches = self._paths[slot]
        assert limit == MOST - len(chain)
        return branches


class Follower:
    """Records which computed tokens of the step with draft tokens belong to its plan."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepPlan, TokenRows | None]] = []

    def take(self, plan: StepPlan) -> None: ...

    def follow(self, plan: StepPlan) -> None: ...

    def computed(
        self,
        plan: StepPlan,
        rows: TokenRows | None = None,
        locations: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.steps.append((plan, rows))

    def check(self, paths: Sequence[Paths]) -> None:
        """Check that they are the ids of its items, with branches after all others."""
        plan, rows = self.steps[1]
        if rows is None:
            return
        firsts: list[int] = []
        behind: list[int] = []
        for item in plan.items:
            if item.slot == PART_SLOT:
                firsts += PART
                continue
            chain, *branches = [[int(item.token_ids[0]), *ids] for ids in paths[item.slot]]
            firsts += chain
            behind += [token_id for branch in branches for token_id in branch]
        computed = np.array(firsts + behind)
        assert computed[rows].tolist() == np.concatenate([i.token_ids for i in plan.items]).tolist()


@dataclass
class Ran:
    token_ids: list[int]
    drawn: list[list[int]]
    """Its tokens of each step."""
    outcomes: list[StepOutcome]
    cache: KVCache
    written: torch.Tensor
    """Entries that must be computed, layers and groups first."""


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A plain model, and one whose layers are in several groups, some with windows."""
    path: Path = tmp_path_factory.mktemp("model")
    tiny_models.write(request.param, path)
    return load_model(path, backend=backend_named("native"))


async def run_all(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    page_size: int,
    temperature: float,
    paths: Sequence[Paths] = (),
    *,
    count: int = MOST + 2,
    max_branches: int = 4,
    spare: int | None = None,
    part_first: bool = False,
    dropped: int = 0,
) -> list[Ran]:
    """Compute prompts, each in a slot, then a step with draft tokens, if any, then single tokens.

    Draws at least `count` tokens for each prompt. The step with draft tokens also computes a part
    of one more prompt, before or after them. The last `dropped` entries of the prompts are
    overwritten.
    """
    groups = decoder.layout.num_groups
    lengths = [*(len(one) + count + MOST + 1 for one in prompts), len(PART)]
    sizes = [pages_for(length, page_size) * groups for length in lengths]
    scratch = spare
    if scratch is None:
        scratch = scratch_pages(max_branches, MOST, len(prompts), page_size, groups)
    cache = decoder.new_cache(2 * sum(sizes) + scratch, page_size)
    fill(cache, torch.full_like(contents(cache), POISON))
    follower = Follower()
    pool = cache.num_pages - scratch
    host = Host(
        page_size,
        NUM_SLOTS,
        groups,
        follower=follower,
        max_branches=max_branches,
        scratch=ScratchPages(pool, cache.num_pages),
    )
    worker = CpuWorker(decoder, cache, num_slots=NUM_SLOTS, num_pages=pool)
    runner = StepThreadRunner(host, worker, name="test")
    if paths:
        runner.take_drafter(Told(dict(enumerate(paths))))
    # Shuffled, so that a page that is mistaken for another shows.
    order = np.random.default_rng(0).permutation(2 * sum(sizes)).astype(np.int32)
    tables = [
        order[first : first + n] for first, n in zip(np.cumsum([0, *sizes]), sizes, strict=False)
    ]
    outcomes = [await runner.launch(first_plan(prompts, tables, temperature))]
    drawn = [[[token_id]] for token_id in outcomes[0].token_ids]
    known = [[*one, *ids[0]] for one, ids in zip(prompts, drawn, strict=True)]
    while slots := [i for i, ids in enumerate(known) if len(ids) < len(prompts[i]) + count]:
        step = len(outcomes)
        ids = [PENDING_TOKEN] + [DRAFT_TOKEN] * (MOST if paths and step == 1 else 0)
        items = [
            item_of(ItemKind.VERIFY, slot, len(known[slot]) - 1, ids, 0, dropped=dropped)
            for slot in slots
        ]
        if step == 1:
            part = item_of(ItemKind.PREFILL, PART_SLOT, 0, PART)
            items.insert(0 if part_first else len(items), part)
        outcomes.append(await runner.launch(StepPlan(step=step, items=tuple(items))))
        left = iter(outcomes[-1].token_ids)
        for row, slot in enumerate(slots):
            number = outcomes[-1].token_counts.get(row, 1)
            drawn[slot].append([next(left) for _ in range(number)])
            known[slot] += drawn[slot][-1]
    await runner.aclose()
    if paths:
        follower.check(paths)
    ends = [len(ids) - 1 - dropped for ids in known]
    return [
        Ran(ids, of_steps, outcomes, cache, written_to(cache, table, groups, end))
        for table, ids, of_steps, end in zip(tables, known, drawn, ends, strict=False)
    ]


def first_plan(
    prompts: Sequence[Sequence[int]], tables: Sequence[Table], temperature: float
) -> StepPlan:
    """Make a plan that starts all slots and computes the prompts."""
    starts = [
        SlotStart(
            slot=slot,
            params=SamplingParams(temperature=temperature),
            seed=7 + slot,
            prompt_tokens=len(prompt),
            drafting=DraftedSequence(
                known_ids=np.array(prompt, np.int32), prompt_tokens=len(prompt)
            ),
        )
        for slot, prompt in enumerate(prompts)
    ]
    starts.append(SlotStart(slot=PART_SLOT, params=SamplingParams(), seed=0))
    return StepPlan(
        step=0,
        started_slots=tuple(starts),
        pages=tuple(
            SlotPages(start.slot, 0, table) for start, table in zip(starts, tables, strict=True)
        ),
        items=tuple(
            item_of(ItemKind.PREFILL, slot, 0, prompt, len(prompt) - 1)
            for slot, prompt in enumerate(prompts)
        ),
    )


def item_of(
    kind: ItemKind,
    slot: int,
    start: int,
    token_ids: Sequence[int],
    offset: int | None = None,
    *,
    dropped: int = 0,
) -> WorkItem:
    """Make an item with a row at the offset; None means no row."""
    ids = np.array(token_ids, np.int32)
    rows = () if offset is None else (SampleRow(offset=offset, slot=slot),)
    return WorkItem(kind, slot, slot, start, start - dropped, len(ids), ids, rows)


def written_to(cache: KVCache, table: Table, groups: int, count: int) -> torch.Tensor:
    """Read the first entries of a slot with this page table, layers and groups first."""
    pages = table.reshape(-1, groups).T  # of each group in order of index
    held = contents(cache)[:, :, torch.from_numpy(pages.copy()).long()]
    # [layers, 2, groups, pages, heads, page_size, dim] -> indices after groups
    return held.transpose(4, 5).flatten(3, 4)[:, :, :, :count]


async def run(
    decoder: Decoder,
    prompt: Sequence[int],
    page_size: int,
    temperature: float,
    paths: Paths | None = None,
    **options: Any,
) -> Ran:
    """Do what `run_all` does, with one prompt."""
    every = [] if paths is None else [paths]
    (found,) = await run_all(decoder, [prompt], page_size, temperature, every, **options)
    return found


def wrong(token_id: int) -> int:
    return (token_id + 1) % tiny_models.VOCAB_SIZE


def path(coming: Sequence[int], right: int, length: int) -> list[int]:
    """Make a path of `right` right draft tokens, and then wrong ones."""
    return [token if at < right else wrong(token) for at, token in enumerate(coming[:length])]


def drawn_paths(data: st.DataObject, coming: Sequence[int]) -> Paths:
    """Draw a chain and at most four branches within the rows, each right up to some length."""
    left, paths = MOST, list[list[int]]()
    while left > bool(paths) and len(paths) < 5:
        length = data.draw(st.integers(0 if not paths else 1, left - bool(paths)))
        paths.append(path(coming, data.draw(st.integers(0, length)), length))
        left -= length + (len(paths) > 1)
    return paths


def assert_as_without(found: Ran, plain: Ran, row: int, paths: Paths, prompt_tokens: int) -> None:
    """Check that tokens and pages of one sequence equal those of a run without draft tokens, and
    that its best path counts."""
    size = len(plain.token_ids)
    assert found.token_ids[:size] == plain.token_ids
    assert torch.equal(found.written[:, :, :, : plain.written.shape[3]], plain.written)

    coming, outcome = plain.token_ids[prompt_tokens + 1 :], found.outcomes[1]
    right = [next((n for n, t in enumerate(p) if t != coming[n]), len(p)) for p in paths]
    assert len(found.drawn[1]) == 1 + max(right)
    assert outcome.drafted.get(row, 0) == max(map(len, paths))
    chain, *branches = paths
    rows = len(chain) + sum(1 + len(branch) for branch in branches)
    assert outcome.drafted.get(row, 0) + outcome.branched.get(row, 0) == rows


page_sizes = st.sampled_from([1, 2, 4, 16])
temperatures = st.sampled_from([0.0, 1.0])


@given(
    data=st.data(),
    prompt_tokens=st.integers(1, 20),
    page_size=page_sizes,
    temperature=temperatures,
    dropped=st.sampled_from([0, 0, 1, 3]),
)
@settings(max_examples=examples(25))
def test_tokens_and_pages_are_as_without_drafts(
    decoder: Decoder,
    data: st.DataObject,
    prompt_tokens: int,
    page_size: int,
    temperature: float,
    dropped: int,
) -> None:
    prompt, dropped = [*range(5, 5 + prompt_tokens)], min(dropped, prompt_tokens - 1)
    plain = asyncio.run(run(decoder, prompt, page_size, temperature, dropped=dropped))
    paths = drawn_paths(data, plain.token_ids[prompt_tokens + 1 :])
    found = asyncio.run(run(decoder, prompt, page_size, temperature, paths, dropped=dropped))
    assert_as_without(found, plain, 0, paths, prompt_tokens)


@given(
    data=st.data(),
    prompt_tokens=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    page_size=page_sizes,
    temperature=temperatures,
    part_first=st.booleans(),
)
@settings(max_examples=examples(25))
def test_two_sequences_of_a_step_are_as_without_drafts(
    decoder: Decoder,
    data: st.DataObject,
    prompt_tokens: tuple[int, int],
    page_size: int,
    temperature: float,
    part_first: bool,
) -> None:
    prompts = [[*range(5, 5 + prompt_tokens[0])], [*range(60, 60 + prompt_tokens[1])]]
    asked: dict[str, Any] = {"part_first": part_first}
    plain = asyncio.run(run_all(decoder, prompts, page_size, temperature, **asked))
    paths = [
        drawn_paths(data, one.token_ids[tokens + 1 :])
        for one, tokens in zip(plain, prompt_tokens, strict=True)
    ]
    found = asyncio.run(run_all(decoder, prompts, page_size, temperature, paths, **asked))
    for row, tokens in enumerate(prompt_tokens):
        assert_as_without(found[row], plain[row], row, paths[row], tokens)


@pytest.mark.parametrize("part_first", [False, True])
@pytest.mark.parametrize("wins", [(True, True), (True, False), (False, True), (False, False)])
def test_branches_of_two_sequences_win_each_for_itself(
    decoder: Decoder, wins: tuple[bool, bool], part_first: bool
) -> None:
    """A chain of the same length wins if no branch does."""
    prompts = [[*range(5, 12)], [*range(60, 73)]]
    asked: dict[str, Any] = {"part_first": part_first}
    plain = asyncio.run(run_all(decoder, prompts, 4, 1.0, **asked))
    paths: list[Paths] = []
    for one, prompt, branch_wins in zip(plain, prompts, wins, strict=True):
        coming = one.token_ids[len(prompt) + 1 :]
        lost = path(coming, 3 - branch_wins, 3)
        paths.append([lost, path(coming, 1, 1), path(coming, 3, 3)])
    found = asyncio.run(run_all(decoder, prompts, 4, 1.0, paths, **asked))
    for row, prompt in enumerate(prompts):
        assert len(found[row].drawn[1]) == 4
        assert_as_without(found[row], plain[row], row, paths[row], len(prompt))


@pytest.mark.parametrize(
    ("max_branches", "winner"), [(most, one) for most in range(1, 5) for one in range(most)]
)
@pytest.mark.parametrize("page_size", [1, 4])
def test_each_of_the_branches_can_win(
    decoder: Decoder, page_size: int, max_branches: int, winner: int
) -> None:
    """All branches are as long as there is room for. The others are right for one token less."""
    prompt = [*range(5, 12)]
    plain = asyncio.run(run(decoder, prompt, page_size, 1.0))
    coming = plain.token_ids[len(prompt) + 1 :]
    length = (MOST - 1) // max_branches - 1
    branches = [path(coming, length - (i != winner), length) for i in range(max_branches)]
    paths = [path(coming, 0, 1), *branches]
    found = asyncio.run(run(decoder, prompt, page_size, 1.0, paths, max_branches=max_branches))
    assert len(found.drawn[1]) == 1 + length
    assert_as_without(found, plain, 0, paths, len(prompt))


def test_branches_without_room_are_left_out(decoder: Decoder) -> None:
    prompt = [*range(5, 12)]
    plain = asyncio.run(run(decoder, prompt, 4, 0.0))
    coming = plain.token_ids[len(prompt) + 1 :]
    paths = [[wrong(coming[0])], coming[:4]]
    groups = decoder.layout.num_groups
    for spare, tokens in ((3 * groups - 1, 5), (2 * groups, 5), (2 * groups - 1, 1), (0, 1)):
        found = asyncio.run(run(decoder, prompt, 4, 0.0, paths, spare=spare))
        assert len(found.outcomes[1].token_ids) == tokens
        assert found.outcomes[1].branched == ({0: 2} if tokens == 5 else {})
        assert found.token_ids[: len(plain.token_ids)] == plain.token_ids


def test_a_step_leaves_other_pages_alone(decoder: Decoder) -> None:
    prompt = [*range(5, 12)]
    plain = asyncio.run(run(decoder, prompt, 4, 0.0))
    coming = plain.token_ids[len(prompt) + 1 :]
    found = asyncio.run(run(decoder, prompt, 4, 0.0, [[wrong(coming[0])], coming[:6]]))
    pool = found.cache.num_pages - scratch_pages(4, MOST, 1, 4, decoder.layout.num_groups)
    touched = (~contents(found.cache).isnan()).flatten(3).any(-1).any(1).any(0)
    expected = (~contents(plain.cache).isnan()).flatten(3).any(-1).any(1).any(0)
    assert not (touched[:pool] & ~expected[:pool]).any()
    assert touched[pool:].any()
