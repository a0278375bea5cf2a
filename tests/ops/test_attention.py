"""Native paged attention against a float64 reference, and bit by bit against itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops import native, reference
from tests.ops.scenarios import DTYPES, Heads, Scenario, lay_out, widened

# A lone token, a prefill, chunks across a key block and across a split of the keys, decodes.
MIXED = [(1, 1, 1), (2, 70, 70), (3, 1, 65), (4, 33, 600), (5, 1, 700), (6, 5, 64)]
OPTIONS = [(0, 0.0), (33, 0.0), (0, 4.0), (130, 4.0)]


def attend(scenario: Scenario, **options: float) -> Tensor:
    scale = scenario.q.shape[-1] ** -0.5
    return native.paged_attention(
        scenario.q,
        *scenario.pages,
        scenario.batch,
        scale=scale,
        window=int(options.get("window", 0)),
        soft_cap=options.get("soft_cap", 0.0),
    )


def check(scenario: Scenario, window: int = 0, soft_cap: float = 0.0) -> None:
    got = attend(scenario, window=window, soft_cap=soft_cap)
    expected = reference.paged_attention(
        *widened(scenario),
        scenario.batch,
        scale=scenario.q.shape[-1] ** -0.5,
        window=window,
        soft_cap=soft_cap,
    )
    assert got.dtype == scenario.q.dtype
    if got.dtype is torch.float32:
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    else:
        # The result is rounded to 8 bits, and with bfloat16 products so is each weight: errors of
        # 2^-9 of |v| <= 4 that mostly cancel.
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize(("window", "soft_cap"), OPTIONS)
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mixed_batch_agrees_with_the_reference(
    isa: str, dtype: torch.dtype, page_size: int, window: int, soft_cap: float
) -> None:
    scenario = lay_out(MIXED, Heads(8, 4, 64), page_size=page_size, dtype=dtype)
    check(scenario, window, soft_cap)


@pytest.mark.parametrize(
    "heads",
    [Heads(4, 4, 16), Heads(6, 1, 80), Heads(4, 2, 128), Heads(14, 2, 256), Heads(3, 1, 37)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_counts_and_sizes_agree_with_the_reference(
    isa: str, dtype: torch.dtype, heads: Heads
) -> None:
    check(lay_out(MIXED, heads, dtype=dtype))


def test_more_grouped_heads_than_a_block_has_rows(isa: str) -> None:
    check(lay_out([(1, 3, 80), (2, 1, 9)], Heads(71, 1, 16)))


sequences = st.integers(1, 200).flatmap(
    lambda context: st.tuples(st.integers(1, 9), st.integers(1, context), st.just(context))
)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(sequences, min_size=1, max_size=5),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    page_size=st.sampled_from([1, 2, 16, 64]),
    window=st.sampled_from([0, 1, 2, 17, 64, 65]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_batch_agrees_with_the_reference(
    batch: list[tuple[int, int, int]],
    group: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    heads = Heads(group * kv_heads, kv_heads, head_dim)
    check(lay_out(batch, heads, page_size=page_size, dtype=dtype), window)


# One and three rows per decode: tiles of every height take part.
@pytest.mark.parametrize(
    ("heads", "window", "soft_cap"), [(Heads(2, 2, 24), 0, 0.0), (Heads(3, 1, 24), 300, 4.0)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_to_the_last_bit_in_any_chunk_batch_and_page_size(
    isa: str, dtype: torch.dtype, heads: Heads, window: int, soft_cap: float
) -> None:
    context = 1100
    options = {"window": window, "soft_cap": soft_cap}
    whole = attend(lay_out([(7, context, context)], heads, dtype=dtype), **options)
    for page_size, chunk in ((16, 1), (1, 37), (64, 300), (2, 512)):
        for end in (1, 64, 65, 512, 513, 1025, 1100):
            tokens = min(chunk, end)
            others = [(1, 5, 40), (7, tokens, end), (2, 1, 900)]
            scenario = lay_out(others, heads, page_size=page_size, dtype=dtype, seed=end)
            rows = attend(scenario, **options)[5 : 5 + tokens]
            assert torch.equal(rows, whole[end - tokens : end]), (page_size, chunk, end)


@pytest.mark.parametrize("sequences", [[(1, 1, 3000)], [(1, 3, 1500), (2, 1, 2000)], MIXED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(
    threads: None, dtype: torch.dtype, sequences: list[tuple[int, int, int]]
) -> None:
    scenario = lay_out(sequences, Heads(8, 2, 64), dtype=dtype)
    _native.set_num_threads(1)
    alone = attend(scenario, window=2100)
    for count in (2, 3, 8):
        _native.set_num_threads(count)
        assert torch.equal(attend(scenario, window=2100), alone), count


def test_queries_may_be_a_view_of_a_fused_projection(isa: str) -> None:
    scenario = lay_out(MIXED, Heads(8, 4, 64))
    tokens = scenario.q.shape[0]
    fused = torch.full((tokens, 16, 64), float("nan"))
    fused[:, :8] = scenario.q
    view = Scenario(scenario.cache, scenario.batch, fused[:, :8])
    assert torch.equal(attend(view), attend(scenario))


def test_keys_before_the_window_are_never_read(isa: str) -> None:
    scenario = lay_out([(1, 1, 700), (2, 4, 100)], Heads(4, 2, 32), page_size=1)
    before = attend(scenario, window=50)
    for row, oldest in ((0, 650), (1, 47)):
        pages = scenario.batch.page_table[row, :oldest].long()
        scenario.cache.storage[:, :, pages] = float("nan")
    assert torch.equal(attend(scenario, window=50), before)


def test_nan_in_one_sequence_stays_there(isa: str) -> None:
    scenario = lay_out(MIXED, Heads(8, 4, 64))
    scenario.q[75, 3] = float("nan")
    rows = attend(scenario).isnan()
    assert rows[75, 3].all()
    rows[75, 3] = False
    assert not rows.any()


def test_several_threads_may_call_at_once(threads: None) -> None:
    _native.set_num_threads(3)
    scenarios = [lay_out(MIXED, Heads(8, 4, 64), seed=i) for i in range(2)]
    scenarios += [lay_out([(i, 1, 2000)], Heads(8, 4, 64)) for i in range(2)]
    expected = [attend(scenario) for scenario in scenarios]

    def repeat(which: int) -> bool:
        return all(torch.equal(attend(scenarios[which]), expected[which]) for _ in range(30))

    with ThreadPoolExecutor(len(scenarios)) as executor:
        assert all(executor.map(repeat, range(len(scenarios))))


def test_a_batch_without_tokens_gives_no_rows() -> None:
    scenario = lay_out([(1, 0, 5)], Heads(2, 1, 16))
    assert attend(scenario).shape == (0, 2, 16)


def test_impossible_batches_are_refused_by_name() -> None:
    heads = Heads(4, 2, 32)
    scenario = lay_out([(1, 2, 40)], heads)
    scenario.batch.page_table[0, 1] = 1000
    with pytest.raises(ValueError, match="sequence 0 names page 1000 of 5"):
        attend(scenario)
    scenario = lay_out([(1, 2, 40)], heads)
    scenario.batch.context_lens[0] = 65
    with pytest.raises(ValueError, match="sequence 0 has a context of 65, but its page table ends"):
        attend(scenario)
    scenario.batch.context_lens[0] = 1
    with pytest.raises(ValueError, match="sequence 0 has 2 query tokens in a context of 1"):
        attend(scenario)
    scenario.batch.query_start[1] = 3
    with pytest.raises(ValueError, match="query_start must run from 0"):
        attend(scenario)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    scenario = lay_out([(1, 2, 40)], Heads(4, 2, 32))
    q, (k_pages, v_pages), batch = scenario.q, scenario.pages, scenario.batch
    with pytest.raises(TypeError, match=r"q must be float32 or bfloat16, got torch.float16"):
        native.paged_attention(q.half(), k_pages, v_pages, batch, scale=1)
    with pytest.raises(TypeError, match=r"v_pages must be torch.float32, got torch.bfloat16"):
        native.paged_attention(q, k_pages, v_pages.bfloat16(), batch, scale=1)
    with pytest.raises(ValueError, match="q must have shape"):
        native.paged_attention(q[:, :3], k_pages, v_pages, batch, scale=1)
    with pytest.raises(ValueError, match="k_pages must be a contiguous CPU tensor"):
        native.paged_attention(q, k_pages[:, :, ::2], v_pages[:, :, ::2], batch, scale=1)
    with pytest.raises(ValueError, match="q must be dense in its last dimension"):
        native.paged_attention(q.mT.contiguous().mT, k_pages, v_pages, batch, scale=1)
    with pytest.raises(ValueError, match="window and soft_cap must be at least 0"):
        native.paged_attention(q, k_pages, v_pages, batch, scale=1, window=-1)
