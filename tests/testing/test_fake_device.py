"""The fake device computes the tokens that it should, and notices whatever is planted in a plan."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import InvariantError
from aioserve.request import SamplingParams
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import PENDING_TOKEN, ItemKind, SampleRow, SlotStart, WorkItem
from aioserve.testing import FakeDevice, expected_tokens
from tests.placed import placed_item, placed_plan

GREEDY = SamplingParams(temperature=0.0)
PAGE_SIZE = 4
PROMPT = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4]
TOKENS = expected_tokens(PROMPT, 8, seed=3)


def item(start, ids, pages, *, sequence_id=1, sample=True, slot=None, slots=()) -> WorkItem:
    """`slots` sample from its last token beside its own."""
    slot = sequence_id if slot is None else slot
    rows = [SampleRow(offset=len(ids) - 1, slot=each) for each in (slot, *slots)]
    return placed_item(
        sequence_id=sequence_id,
        slot=slot,
        start=start,
        count=len(ids),
        token_ids=np.array(ids, np.int32),
        page_ids=np.array(pages, np.int32),
        rows=tuple(rows) if sample else (),
    )


def step(device: FakeDevice, *items: WorkItem, copies=()) -> StepOutcome:
    return device.execute(placed_plan(step=0, items=items, copies=tuple(copies)))


def device(num_host_pages=0, *, seeds=(3,) * 8) -> FakeDevice:
    """One whose slots have started."""
    it = FakeDevice(12, PAGE_SIZE, num_slots=8, num_host_pages=num_host_pages)
    start_slots(it, seeds)
    return it


def start_slots(it: FakeDevice, seeds) -> None:
    starts = [SlotStart(slot=i, params=GREEDY, seed=seed) for i, seed in enumerate(seeds)]
    it.execute(placed_plan(step=0, items=(), started_slots=tuple(starts)))


def decode(it: FakeDevice, pages, count=3, *, start=10, slot=1) -> list[int]:
    """Further tokens of a sequence whose last one waits on the device. Page 6 is its fourth."""
    tokens = []
    if len(pages) == 3:
        pages = [*pages, 6]
    for position in range(start, start + count):
        work = item(position, [PENDING_TOKEN], pages, slot=slot)
        tokens += step(it, work).token_ids
    return tokens


@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 39)),
    page_size=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_chunks_on_any_pages_give_the_expected_tokens(prompt, cuts, page_size, seed):
    it = FakeDevice(64, page_size, num_slots=1)
    start_slots(it, [seed])
    pages = np.random.default_rng(seed % 2**32).permutation(64)
    ends = [*sorted(cut for cut in cuts if cut < len(prompt)), len(prompt)]
    tokens, start = [], 0
    for end in ends:
        last = end == len(prompt)
        work = item(start, prompt[start:end], pages, sample=last, slot=0)
        tokens = list(step(it, work).token_ids)
        start = end
    tokens += decode(it, pages, 4, start=start, slot=0)
    assert tokens == expected_tokens(prompt, 5, seed)


def test_tokens_depend_on_every_token_of_the_prompt_and_on_the_seed():
    answers = {tuple(expected_tokens(PROMPT, 8, seed)) for seed in range(20)}
    for position in range(len(PROMPT)):
        changed = list(PROMPT)
        changed[position] += 1
        answers.add(tuple(expected_tokens(changed, 8, seed=0)))
    answers.add(tuple(expected_tokens(PROMPT[1:], 8)))
    assert len(answers) == 20 + len(PROMPT) + 1


def test_a_sequence_may_read_what_another_writes_in_the_same_step():
    it = device()
    first = item(0, PROMPT, [5, 3, 8])
    second = item(8, PROMPT[8:], [5, 3, 9], sequence_id=2)
    assert step(it, first, second).token_ids == (TOKENS[0], TOKENS[0])
    assert decode(it, [5, 3, 9], slot=2) == TOKENS[1:4]


def test_rows_of_one_token_have_seeds_and_slots_of_their_own():
    seeds = {1: 3, 2: 5, 3: 6}
    it = device(seeds=[0, *seeds.values()])
    tokens = step(it, item(0, PROMPT, [5, 3, 8], slots=[2, 3])).token_ids
    assert list(tokens) == [expected_tokens(PROMPT, 1, seed)[0] for seed in seeds.values()]
    # The last page is copied on the first write of all but one.
    copies = [PageCopy(0, 8, 0, 9, 2), PageCopy(0, 9, 0, 10, 2)]
    tables = {1: [5, 3, 9], 2: [5, 3, 10], 3: [5, 3, 8]}
    work = [item(10, [PENDING_TOKEN], tables[i], sequence_id=i) for i in seeds]
    tokens = step(it, *work, copies=copies).token_ids
    assert list(tokens) == [expected_tokens(PROMPT, 2, seed)[1] for seed in seeds.values()]


def test_pages_go_to_the_host_and_back_in_the_order_of_the_copies():
    it = device(num_host_pages=3)
    assert step(it, item(0, PROMPT, [5, 3, 8])).token_ids == (TOKENS[0],)
    copies = [
        PageCopy(0, 5, 1, 2, 4),
        PageCopy(0, 3, 1, 0, 4),
        PageCopy(1, 0, 0, 5, 4),
        PageCopy(1, 2, 0, 3, 4),
        PageCopy(0, 8, 0, 1, 2),
    ]
    work = item(10, [PENDING_TOKEN], [3, 5, 1])
    assert step(it, work, copies=copies).token_ids == (TOKENS[1],)


# -- planted faults


def faulty_tokens(fault: str) -> list[int]:
    """The answer to `PROMPT` with one thing wrong."""
    it = device(num_host_pages=2)
    pages = [5, 3, 8]
    step(it, item(0, PROMPT, pages))
    match fault:
        case "wrong page":
            pages = [5, 4, 8]
        case "pages in another order":
            pages = [3, 5, 8]
        case "stale page":
            step(it, item(0, [1, 2, 3, 4], [5], sequence_id=2))
        case "page written by another":
            step(it, item(9, [77], [0, 1, 8], sequence_id=2, sample=False))
        case "missing copy":
            pages = [5, 3, 9]
        case "copy of too few tokens":
            step(it, copies=[PageCopy(0, 8, 0, 9, 1)])
            pages = [5, 3, 9]
        case "copy of another page":
            step(it, copies=[PageCopy(0, 3, 0, 9, 2)])
            pages = [5, 3, 9]
        case "copies out of order":
            back, out = (
                PageCopy(1, 1, 0, 9, 4),
                PageCopy(0, 3, 1, 1, 4),
            )
            step(it, copies=[back, out])
            pages = [5, 9, 8]
        case "scribbled page":
            it.scribble(np.array([3]))
        case "last token of another":
            step(it, item(0, [9], [0], sequence_id=2, slot=1))
    return decode(it, pages, 4)


def test_without_a_fault_the_tokens_are_right():
    assert faulty_tokens("none") == TOKENS[1:5]


@pytest.mark.parametrize(
    "fault",
    [
        "wrong page",
        "pages in another order",
        "stale page",
        "page written by another",
        "missing copy",
        "copy of too few tokens",
        "copy of another page",
        "copies out of order",
        "scribbled page",
        "last token of another",
    ],
)
def test_a_planted_fault_changes_the_tokens(fault):
    assert faulty_tokens(fault) != TOKENS[1:5]


@given(cut=st.integers(1, len(PROMPT)))
def test_rows_of_any_token_sample_what_follows_it(cut):
    it = device()
    work = item(0, PROMPT, [5, 3, 8])
    rows = (SampleRow(offset=cut - 1, slot=1), *work.rows)
    tokens = step(it, msgspec.structs.replace(work, rows=rows)).token_ids
    assert tokens == (expected_tokens(PROMPT[:cut], 1, seed=3)[0], TOKENS[0])


def test_a_slot_that_starts_again_has_forgotten_its_last_token():
    it = device()
    step(it, item(0, PROMPT, [5, 3, 8]))
    start_slots(it, (3,) * 8)
    assert decode(it, [5, 3, 8]) != TOKENS[1:4]


def test_junk_on_the_host_is_junk_on_the_device():
    it = device(num_host_pages=2)
    step(it, item(0, PROMPT, [5, 3, 8]), copies=[])
    step(it, copies=[PageCopy(0, 3, 1, 1, 4)])
    it.scribble(np.array([3]), np.array([1]))
    step(it, copies=[PageCopy(1, 1, 0, 3, 4)])
    assert decode(it, [5, 3, 8]) != TOKENS[1:4]


def test_a_step_that_fails_leaves_what_it_had_done():
    it = device()
    first = item(0, PROMPT[:4], [5], sample=False)
    second = item(0, PROMPT, [1, 2, 4], sequence_id=2)
    copy = PageCopy(0, 0, 0, 3, 1)
    it.execute_in_part(placed_plan(step=0, items=(first, second), copies=(copy,)), 2)
    assert step(it, item(4, PROMPT[4:], [5, 3, 8])).token_ids == (TOKENS[0],)
    assert decode(it, [1, 2, 4]) != TOKENS[1:4]


def past_its_end() -> WorkItem:
    row = SampleRow(offset=1, slot=1)
    return msgspec.structs.replace(item(0, [1], [5]), rows=(row,))


@pytest.mark.parametrize(
    ("items", "copies", "message"),
    [
        (
            [item(0, [1, 2], [5]), item(2, [3], [5], sequence_id=2)],
            (),
            "sequence 2 writes page 5, as does sequence 1",
        ),
        ([item(0, [1] * 5, [5])], (), "ends at 5 and has 1 pages of 4"),
        ([item(0, [1], [-1])], (), r"names pages \[.*-1\] of 12"),
        ([item(0, [1], [12])], (), r"names pages \[.*12\] of 12"),
        ([item(0, [1], [5], slot=8)], (), "slot 8 gets pages, and there are 8"),
        ([item(0, [1], [5], slot=-1)], (), "slot -1 gets pages, and there are 8"),
        ([item(0, [1], [5], slots=[7])], (), "slot 7, which hasn't started"),
        ([item(-1, [1], [5])], (), "computes from -1"),
        ([item(1, [], [5], sample=False)], (), "0 tokens\\) computes"),
        ([item(1, [], [5])], (), "0 tokens\\) computes"),
        ([past_its_end()], (), "a row of its own alone"),
        ([], [PageCopy(0, 0, 0, 12, 1)], r"target=12.* \[12, 0\] pages"),
        ([], [PageCopy(0, -1, 0, 1, 1)], "source=-1"),
        ([], [PageCopy(0, 0, 0, 1, 5)], "num_tokens=5"),
        ([], [PageCopy(0, 0, 0, 1, 0)], "num_tokens=0"),
        ([], [PageCopy(0, 0, 1, 0, 1)], r"\[12, 0\] pages in each tier"),
    ],
)
def test_a_plan_that_no_runner_could_compute_is_refused(items, copies, message):
    it = device(seeds=(3,) * 7)
    with pytest.raises((ValueError, InvariantError), match=message):
        step(it, *items, copies=copies)


@pytest.mark.parametrize(("num_right", "num_wrong"), [(0, 1), (1, 0), (2, 2), (4, 0)])
def test_drafts_are_verified_up_to_the_first_wrong_one(num_right, num_wrong):
    it = device()
    step(it, item(0, PROMPT, [5, 3, 8, 6, 7]))
    ids = [PENDING_TOKEN, *TOKENS[1 : 1 + num_right], *[300] * num_wrong]
    verified = item(10, ids, [5, 3, 8, 6, 7])
    rows = (SampleRow(offset=0, slot=1),)
    outcome = step(it, msgspec.structs.replace(verified, kind=ItemKind.VERIFY, rows=rows))
    assert outcome.token_ids == tuple(TOKENS[1 : 2 + num_right])
    assert outcome.token_counts == ({0: 1 + num_right} if num_right else {})
    assert decode(it, [5, 3, 8, 6, 7], 2, start=11 + num_right) == TOKENS[2 + num_right :][:2]
