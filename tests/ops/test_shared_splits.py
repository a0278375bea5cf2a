"""Attention of sequences that share pages: keys are read once for several, with the same bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops.backend import AttentionKind
from aioserve.ops.native import own_arrays
from tests.ops.scenarios import DTYPES, NATIVE, Heads, Scenario, lay_out
from tests.tiers import examples

SPLIT = 512  # keys, as `kSplitKeys`
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def attend(scenario: Scenario, *, window: int = 0, logit_rows_only: bool = False) -> Tensor:
    step = scenario.on(NATIVE)
    kind = AttentionKind(step.kv.head_dim**-0.5, window)
    return NATIVE.paged_attention(step.qkv, step.at, kind, logit_rows_only=logit_rows_only)


def shared_splits(
    scenario: Scenario, heads: Heads, *, window: int = 0, logit_rows_only: bool = False
) -> int:
    arrays = own_arrays(scenario.on(NATIVE).batch)
    return arrays.shared_splits(
        kv_heads=heads.kv,
        group=heads.q // heads.kv,
        head_dim=heads.dim,
        window=window,
        logit_rows_only=logit_rows_only,
    )


def each_alone(scenario: Scenario) -> Tensor:
    rows = range(len(scenario.host.context_lens))
    return torch.cat([attend(scenario.alone(row)) for row in rows])


def decodes_of_one_prefix(
    count: int,
    heads: Heads,
    *,
    prefix: int = 1024,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Scenario:
    """Lay out contexts of different lengths that share their first `prefix` keys."""
    sequences = [(i, 1, prefix + 1 + 9 * i) for i in range(count)]
    scenario = lay_out(sequences, heads, page_size=page_size, dtype=dtype)
    for row in range(1, count):
        scenario.share(row, 0, 0, prefix // page_size)
    return scenario


@st.composite
def batches(draw: st.DrawFn) -> tuple[Scenario, Heads]:
    """Draw decodes and chunks, some of which share runs of pages with an earlier sequence."""
    page_size = draw(st.sampled_from([1, 2, 3, 8, 16, 24, 32, 64, 128]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8, 20]))
    heads = Heads(kv_heads * group, kv_heads, draw(st.sampled_from([8, 24, 32, 37])))
    contexts = st.one_of(st.integers(1, 1600), st.integers(1020, 1060))
    chosen = draw(st.lists(st.tuples(st.integers(1, 4), contexts), min_size=2, max_size=6))
    if draw(st.booleans()):
        chosen.append((40, 700))
    sequences = [(i, min(tokens, context), context) for i, (tokens, context) in enumerate(chosen)]
    scenario = lay_out(
        draw(st.permutations(sequences)),
        heads,
        page_size=page_size,
        dtype=draw(st.sampled_from(DTYPES)),
    )
    lengths = scenario.host.context_lens
    for row in range(1, len(sequences)):
        of = draw(st.integers(0, row - 1))
        pages = int(min(lengths[row], lengths[of])) // page_size
        most = draw(st.sampled_from([0, pages // 2, pages, pages]))
        first = draw(st.sampled_from([0, 0, 0, most // 2, 1]))
        scenario.share(row, of, first, most)
    return scenario, heads


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batch=batches(), count=st.sampled_from([1, 2, 3, 8]))
def test_a_row_is_that_of_its_sequence_alone_whoever_shares_its_pages(
    isa: str, threads: None, batch: tuple[Scenario, Heads], count: int
) -> None:
    scenario, _ = batch
    _native.set_num_threads(count)
    together = attend(scenario)
    _native.set_num_threads(1)
    assert torch.equal(together, each_alone(scenario))


# Counts fill one row of a tile, several, and more than a group.
@pytest.mark.parametrize("heads", [Heads(2, 2, 24), Heads(8, 4, 64), Heads(3, 1, 32)])
@dtypes
def test_many_decodes_behind_one_prefix_have_the_bits_of_each_alone(
    isa: str, threads: None, dtype: torch.dtype, heads: Heads
) -> None:
    scenario = decodes_of_one_prefix(40, heads, dtype=dtype)
    expected = each_alone(scenario)
    for count in (1, 2, 5, 16):
        _native.set_num_threads(count)
        assert shared_splits(scenario, heads) >= 2 * heads.kv
        assert torch.equal(attend(scenario), expected), count


@pytest.mark.parametrize("page_size", [1, 8, 64, 512])
def test_whole_splits_that_are_shared_are_read_once(threads: None, page_size: int) -> None:
    _native.set_num_threads(1)
    heads = Heads(4, 2, 16)

    def count(members: int, prefix: int) -> int:
        scenario = decodes_of_one_prefix(members, heads, prefix=prefix, page_size=page_size)
        return shared_splits(scenario, heads)

    assert count(1, 1024) == 0
    assert count(2, 1024) == count(32, 1024) == 2 * heads.kv
    assert count(2, 512) == heads.kv
    assert count(33, 1024) == 2 * heads.kv  # the last one has nobody to share a block with
    assert count(34, 1024) == 4 * heads.kv  # 64 rows are a block
    if page_size < 512:
        assert count(32, 1024 - page_size) == heads.kv
        assert count(32, 512 - page_size) == 0


def test_threads_that_would_have_nothing_to_do_get_groups_of_their_own(threads: None) -> None:
    heads = Heads(4, 2, 16)
    counts = []
    for count in (1, 4, 16, 64):
        _native.set_num_threads(count)
        counts.append(shared_splits(decodes_of_one_prefix(32, heads), heads))
    assert counts == [4, 4, 16, 64]


def test_only_what_lies_in_the_split_decides_whether_it_is_shared(threads: None) -> None:
    _native.set_num_threads(1)
    heads = Heads(4, 2, 16)
    sequences = [(i, 1, 1100) for i in range(3)]

    def laid_out() -> Scenario:
        return lay_out(sequences, heads, page_size=16)

    second = laid_out()
    second.share(2, 0, 32, 64)
    assert shared_splits(second, heads) == heads.kv
    assert torch.equal(attend(second), each_alone(second))
    for other in (0, 1, 17, 31):
        nearly = laid_out()
        nearly.share(2, 0, 0, 32)
        assert shared_splits(nearly, heads) == heads.kv
        nearly.host.page_table[0, 2, other] = nearly.host.page_table[0, 1, other]
        assert shared_splits(nearly, heads) == 0, other
        assert torch.equal(attend(nearly), each_alone(nearly)), other


def test_what_no_whole_split_is_behind_of_is_not_shared(threads: None) -> None:
    _native.set_num_threads(1)
    heads = Heads(4, 2, 16)

    def count(tokens: int, context: int, page_size: int = 16, window: int = 0) -> int:
        scenario = lay_out([(i, tokens, context) for i in range(3)], heads, page_size=page_size)
        for row in (1, 2):
            scenario.share(row, 0, 0, context // page_size)
        return shared_splits(scenario, heads, window=window)

    assert count(1, SPLIT + 1) == count(8, SPLIT + 8) == heads.kv
    assert count(1, SPLIT) == count(8, SPLIT + 7) == 0  # a row stands in the split itself
    assert count(1, 1100, page_size=24) == 0  # no page ends where a split does
    assert count(1, 1100, window=1000) == 0
    assert count(17, 1100) == 0  # rows enough for a pass of their own


def test_logit_rows_in_any_order_share_too(threads: None) -> None:
    heads = Heads(4, 2, 24)
    scenario = lay_out([(i, 3, 1060 + i) for i in range(4)], heads)
    for row in range(1, 4):
        scenario.share(row, 0, 0, 64)
    whole = attend(scenario)
    for rows in ([2, 5, 8, 11], [11, 2, 2, 5, 8, 9, 10, 0], [9, 10, 10, 11, 3, 1]):
        host = dataclasses.replace(scenario.host, logit_rows=np.array(rows, np.int64))
        some = dataclasses.replace(scenario, host=host)
        for count in (1, 2, 8):
            _native.set_num_threads(count)
            assert shared_splits(some, heads, logit_rows_only=True) >= 2 * heads.kv
            assert torch.equal(attend(some, logit_rows_only=True), whole[rows])


def test_a_nan_among_those_who_share_stays_in_its_row(isa: str) -> None:
    heads = Heads(4, 2, 32)
    scenario = decodes_of_one_prefix(6, heads)
    scenario.q[3, 1] = float("nan")
    assert shared_splits(scenario, heads) > 0
    rows = attend(scenario).unflatten(1, (heads.q, heads.dim)).isnan()
    assert rows[3, 1].all()
    rows[3, 1] = False
    assert not rows.any()
