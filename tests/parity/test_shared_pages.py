"""Shared, copied and swapped pages give the logits of sequences computed alone, to the last bit.

Every kind of attention: full, latent, windows, soft caps, two ropes, long ropes, learned positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.models.decoder import Decoder
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from aioserve.steps.pages import PageCopy
from tests.ops.contents import contents
from tests.parity.paged import PagedRun
from tests.parity.planned import PlannedRun, item
from tests.parity.tiny_models import VOCAB_SIZE
from tests.tiers import examples

PAGE_SIZES = (1, 2, 16, 64)
MODELS = (
    "llama",
    "mistral",
    "qwen3-sliding",
    "gemma2",
    "gemma3",
    "phi3-longrope",
    "gpt-oss",
    "gpt2",
    "deepseek3",
)
LONGEST = 200

every_model = pytest.mark.parametrize("model", MODELS)
page_sizes = pytest.mark.parametrize("page_size", PAGE_SIZES)
pytestmark = pytest.mark.asyncio


def token_ids(name: str, count: int = LONGEST) -> list[int]:
    return [(ord(name) * 31 + 17 * i * i + i) % VOCAB_SIZE for i in range(count)]


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder_of(directory_of, request: pytest.FixtureRequest) -> Callable[[str], Decoder]:
    native = backend_named("native")
    return cache(lambda model: load_model(directory_of(model), dtype=request.param, backend=native))


def alone(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Compute the logits of every token of a sequence that shares nothing, in one step."""
    return PagedRun(decoder).step({"alone": ids})["alone"]


class Sequence:
    """Prompt whose first `shared` tokens are those of `parent`, in the same pages."""

    def __init__(
        self, slot: int, length: int, page_size: int, free: list[int], parent: Sequence | None
    ) -> None:
        self.slot = slot
        self.parent = parent
        pages = 0 if parent is None else min(length - 1, parent.length) // page_size
        self.shared = pages * page_size
        self.ids = token_ids(chr(ord("a") + slot), length)
        self.pages: list[int] = []
        if parent is not None:
            self.ids[: self.shared] = parent.ids[: self.shared]
            self.pages = parent.pages[:pages]
        while len(self.pages) < pages_for(length, page_size):
            self.pages.append(free.pop())
        self.written = self.shared

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def may_start(self) -> bool:
        """True if shared entries are written in earlier steps, or by earlier items of this one."""
        parent = self.parent
        return parent is None or (parent.may_start and parent.written >= self.shared)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
@every_model
async def test_what_an_earlier_item_of_the_same_step_writes_may_be_shared(model, decoder_of, data):
    """Family trees and chunks are arbitrary. The first sequence decodes, and shares nothing."""
    decoder = decoder_of(model)
    page_size = data.draw(st.sampled_from(PAGE_SIZES), "page size")
    free = list(range(1024))
    family: list[Sequence] = []
    for slot in range(data.draw(st.integers(2, 5), "sequences")):
        choices = st.sampled_from([None, *family])
        parent = data.draw(choices, "parent") if slot > 1 else family[-1] if family else None
        length = data.draw(st.integers(1, LONGEST), "length")
        family.append(Sequence(slot, length, page_size, free, parent))
    decoded = Sequence(len(family), 30, page_size, free, None)
    expected = [alone(decoder, sequence.ids) for sequence in family]
    expected_decodes = alone(decoder, decoded.ids)

    async with PlannedRun(decoder, page_size, num_pages=1024) as run:
        while any(sequence.written < sequence.length for sequence in family):
            items, rows = [], []
            if decoded.written < decoded.length:
                at = decoded.written
                items.append(item(decoded.slot, at, decoded.ids[at : at + 1], decoded.pages))
                rows.append(expected_decodes[at])
                decoded.written += 1
            for sequence in family:
                left = sequence.length - sequence.written
                if not left or not sequence.may_start:
                    continue
                count = data.draw(st.just(left) | st.integers(1, left), "count")
                at = sequence.written
                ids = sequence.ids[at : at + count]
                items.append(item(sequence.slot, at, ids, sequence.pages))
                sequence.written += count
                rows.append(expected[sequence.slot][at + count - 1])
            assert torch.equal(await run.step(items), torch.stack(rows))


@page_sizes
@every_model
async def test_thirty_requests_of_one_step_share_a_prefix_that_the_first_computes(
    model, page_size, decoder_of
):
    decoder = decoder_of(model)
    shared = 128
    pages = [*range(300, 300 + shared // page_size)]
    first = token_ids("a", shared + 1)
    items = [item(0, 0, first, [*pages, 0])]
    rows = [alone(decoder, first)[-1]]
    for slot in range(1, 30):
        tail = token_ids(chr(ord("a") + slot), slot)
        own = range(slot * 30, slot * 30 + pages_for(slot, page_size))
        own = [page if page < 300 else page + 200 for page in own]
        items.append(item(slot, shared, tail, [*pages, *own]))
        rows.append(alone(decoder, first[:shared] + tail)[-1])

    async with PlannedRun(decoder, page_size, num_pages=1200) as run:
        logits = await run.step(items)

    assert torch.equal(logits, torch.stack(rows))


@pytest.mark.parametrize("page_size", [2, 16, 64])
@every_model
async def test_the_valid_part_of_a_page_is_as_good_copied_as_computed(model, page_size, decoder_of):
    decoder = decoder_of(model)
    cached = token_ids("a", 2 * page_size)
    async with PlannedRun(decoder, page_size) as run:
        await run.step([item(0, 0, cached, [7, 5])])
        for valid in {1, page_size // 2, page_size - 1}:
            known = page_size + valid
            ids = cached[:known] + token_ids("b", page_size + 3)
            logits = await run.step(
                [item(1, known, ids[known:], [7, 9, 3, 4])],
                [PageCopy(0, 5, 0, 9, valid)],
            )
            assert torch.equal(logits[0], alone(decoder, ids)[-1])


@page_sizes
@every_model
async def test_forks_write_to_copies_and_their_parent_to_the_page_itself(
    model, page_size, decoder_of
):
    """Four samples of one prompt; each goes on with tokens of its own, one at a time."""
    decoder = decoder_of(model)
    length = 70
    prompt = token_ids("a", length)
    shared = [*range(100, 100 + length // page_size)]
    partial = length % page_size
    tables = []
    for slot in range(4):
        begin = 200 + slot * 10
        tables.append([*shared, *range(begin, begin + pages_for(partial + 5, page_size))])
    copies = [
        PageCopy(0, tables[0][len(shared)], 0, table[len(shared)], partial)
        for table in tables[1:]
        if partial
    ]
    answers = [token_ids(name, 5) for name in "wxyz"]
    expected = [alone(decoder, prompt + answer)[length - 1 :] for answer in answers]

    async with PlannedRun(decoder, page_size) as run:
        logits = await run.step([item(0, 0, prompt, tables[0], samples=range(4))])
        assert torch.equal(logits, expected[0][0].expand(4, -1))
        for count in range(5):
            at = length + count
            items = [item(i, at, answers[i][count : count + 1], tables[i]) for i in range(4)]
            logits = await run.step(items, copies if count == 0 else ())
            assert torch.equal(logits, torch.stack([e[count + 1] for e in expected]))


@page_sizes
@every_model
async def test_a_sequence_that_was_swapped_out_and_in_goes_on_as_if_nothing_had_been(
    model, page_size, decoder_of
):
    """Another sequence uses its old pages in the meantime, and it returns to other pages."""
    decoder = decoder_of(model)
    length = 90
    ids = token_ids("a", length + 2)
    count = pages_for(length + 2, page_size)
    before, host, after = range(count), range(count, 2 * count), range(2 * count, 3 * count)
    held = [min(page_size, length - i * page_size) for i in range(count)]
    kept = [i for i in range(count) if held[i] > 0]
    out = [PageCopy(0, before[i], 1, host[i], held[i]) for i in kept]
    back = [PageCopy(1, host[i], 0, after[i], held[i]) for i in reversed(kept)]
    expected = alone(decoder, ids)
    other = token_ids("b", length)

    async with PlannedRun(decoder, page_size, num_pages=300, num_host_pages=200) as run:
        await run.step([item(0, 0, ids[:length], before)])
        written = contents(run.cache)[:, :, list(before)]
        logits = await run.step([item(1, 0, other, before)], out)
        assert torch.equal(logits[0], alone(decoder, other)[-1])
        one = await run.step([item(0, length, ids[length:-1], after)], back)
        for i in kept:
            swapped = contents(run.cache)[:, :, after[i], :, : held[i]]
            assert torch.equal(swapped, written[:, :, i, :, : held[i]])
        two = await run.step([item(0, length + 1, ids[-1:], after)])

    assert torch.equal(torch.cat([one, two]), expected[-2:])
