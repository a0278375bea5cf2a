"""Native paged attention against a float64 reference, and bit for bit against itself."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops import Backend
from aioserve.ops.backend import AttentionKind
from tests.ops.contents import contents, fill
from tests.ops.scenarios import (
    BACKENDS,
    DTYPES,
    NATIVE,
    REFERENCE,
    Heads,
    Step,
    allocate,
    lay_out,
)
from tests.tiers import examples

# A lone token, a prefill, chunks across a key block and across a split of the keys, decodes.
MIXED = [
    *((1, 1, 1), (2, 70, 70), (3, 1, 65), (4, 33, 600), (5, 1, 700), (6, 5, 64)),
    *((7, 20, 140), (8, 3, 128), (9, 1, 129)),
]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
OPTIONS = [(0, 0.0), (33, 0.0), (130, 4.0), (0, 4.0)]
"""Windows and soft caps. Every second of them has a window and none, a cap and none."""


def attend(step: Step, backend: Backend = NATIVE, **options: float) -> Tensor:
    """Compute attention, [T, Hq, D]."""
    kind = AttentionKind(
        step.kv.head_dim**-0.5, int(options.get("window", 0)), options.get("soft_cap", 0.0)
    )
    rows_only = bool(options.get("logit_rows_only", False))
    attended = backend.paged_attention(step.qkv, step.at, kind, logit_rows_only=rows_only)
    return attended.unflatten(1, (-1, step.kv.head_dim))


@lru_cache(maxsize=64)
def exact(
    sequences: tuple[tuple[int, int, int], ...],
    heads: Heads,
    page_size: int,
    dtype: torch.dtype,
    window: int,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention of `lay_out` in float64, `[T, Hq, D]`, and the mean magnitude of values.

    Both are the same for all instruction sets, and cached."""
    wide = lay_out(sequences, heads, page_size=page_size, dtype=dtype).on(REFERENCE, wide=True)
    expected = attend(wide, REFERENCE, window=window, soft_cap=soft_cap)
    magnitudes = contents(wide.kv)
    magnitudes[:, 1].abs_()
    fill(wide.kv, magnitudes)
    return expected, attend(wide, REFERENCE, window=window, soft_cap=soft_cap)


def check(
    sequences: list[tuple[int, int, int]],
    heads: Heads,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    scenario = lay_out(sequences, heads, page_size=page_size, dtype=dtype)
    got = attend(scenario.on(NATIVE), window=window, soft_cap=soft_cap)
    expected, magnitude = exact(tuple(sequences), heads, page_size, dtype, window, soft_cap)
    assert got.dtype == dtype
    if got.dtype is torch.float32:
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    else:
        # The result is rounded to 8 bits. With bfloat16 products, each weight is rounded, too,
        # before normalisation: errors are 2^-8 of the values' mean magnitude, and of the result.
        limit = 1.01 * 2**-8 * (magnitude + 2 * expected.abs()) + 1e-5
        error = (got.double() - expected).abs()
        assert bool((error <= limit).all()), f"{(error - limit).max()} beyond the limit"


MIXES = [
    pytest.param(dtype, size, *options, marks=() if (i + j + k) % 2 == 0 else pytest.mark.slow)
    for i, dtype in enumerate(DTYPES)
    for j, size in enumerate([1, 2, 3, 16, 33, 64])
    for k, options in enumerate(OPTIONS)
]
"""Every pair of dtype and page size with a window and none, a cap and none. The rest are slow."""


@pytest.mark.parametrize(("dtype", "page_size", "window", "soft_cap"), MIXES)
def test_a_mixed_batch_agrees_with_the_reference(
    isa: str, dtype: torch.dtype, page_size: int, window: int, soft_cap: float
) -> None:
    check(
        MIXED,
        Heads(8, 4, 64),
        page_size=page_size,
        dtype=dtype,
        window=window,
        soft_cap=soft_cap,
    )


@pytest.mark.parametrize(
    "heads",
    [Heads(4, 4, 16), Heads(6, 1, 80), Heads(4, 2, 128), Heads(14, 2, 256), Heads(3, 1, 37)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_counts_and_sizes_agree_with_the_reference(
    isa: str, dtype: torch.dtype, heads: Heads
) -> None:
    check(MIXED, heads, dtype=dtype)


def test_more_grouped_heads_than_a_block_has_rows(isa: str) -> None:
    check([(1, 3, 80), (2, 1, 9)], Heads(71, 1, 16))


sequences = st.integers(1, 200).flatmap(
    lambda context: st.tuples(st.integers(1, 9), st.integers(1, context), st.just(context))
)


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=st.lists(sequences, min_size=1, max_size=5),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    page_size=st.sampled_from([1, 2, 5, 8, 16, 24, 64]),
    window=st.sampled_from([0, 1, 2, 17, 128, 129]),
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
    check(batch, heads, page_size=page_size, dtype=dtype, window=window)


# Decodes have one, two and three rows, for tiles of every height. Keys and values are read in place
# or copied, depending on the sizes of heads and pages.
@pytest.mark.parametrize(
    ("heads", "window", "soft_cap"),
    [(Heads(2, 2, 24), 0, 0.0), (Heads(3, 1, 24), 300, 4.0), (Heads(2, 1, 32), 0, 0.0)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_to_the_last_bit_in_any_chunk_batch_and_page_size(
    isa: str, dtype: torch.dtype, heads: Heads, window: int, soft_cap: float
) -> None:
    context = 1100
    options = {"window": window, "soft_cap": soft_cap}
    whole = attend(lay_out([(7, context, context)], heads, dtype=dtype).on(NATIVE), **options)
    for page_size, chunk in ((16, 1), (1, 37), (64, 300), (2, 512), (7, 3), (48, 9)):
        for end in (1, 128, 129, 512, 513, 1025, 1100):
            tokens = min(chunk, end)
            others = [(1, 5, 40), (7, tokens, end), (2, 1, 900)]
            scenario = lay_out(others, heads, page_size=page_size, dtype=dtype, seed=end)
            rows = attend(scenario.on(NATIVE), **options)[5 : 5 + tokens]
            assert torch.equal(rows, whole[end - tokens : end]), (page_size, chunk, end)


@pytest.mark.parametrize("sequences", [[(1, 1, 3000)], [(1, 3, 1500), (2, 1, 2000)], MIXED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(
    threads: None, dtype: torch.dtype, sequences: list[tuple[int, int, int]]
) -> None:
    scenario = lay_out(sequences, Heads(8, 2, 64), dtype=dtype)
    _native.set_num_threads(1)
    alone = attend(scenario.on(NATIVE), window=2100)
    for count in (2, 3, 8):
        _native.set_num_threads(count)
        assert torch.equal(attend(scenario.on(NATIVE), window=2100), alone), count


# Rows are sorted as by a scheduler, with one token sampled twice, and then unsorted.
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [0, 70, 71, 104, 105, 110],
        [0, 1, 1, 1, 3, 40, 41, 69, 70, 103, 105, 106, 110],
        [110, 3, 2, 2, 71, 0, 0, 105, 104],
    ],
)
@pytest.mark.parametrize(("window", "soft_cap"), OPTIONS)
@backends
def test_attention_from_the_logit_rows_alone_is_that_of_all_rows(
    backend: Backend, threads: None, window: int, soft_cap: float, rows: list[int]
) -> None:
    scenario = lay_out(MIXED, Heads(8, 2, 40))
    whole = attend(scenario.on(backend), backend, window=window, soft_cap=soft_cap)
    some = dataclasses.replace(
        scenario, host=dataclasses.replace(scenario.host, logit_rows=np.array(rows, np.int64))
    )
    for count in (1, 2, 8):
        _native.set_num_threads(count)
        got = attend(
            some.on(backend), backend, window=window, soft_cap=soft_cap, logit_rows_only=True
        )
        assert torch.equal(got, whole[rows])


def test_rows_may_lie_apart(isa: str) -> None:
    step = lay_out(MIXED, Heads(8, 4, 64)).on(NATIVE)
    tokens, width = step.qkv.shape
    spread = torch.full((tokens, width + 24), float("nan"))
    spread[:, :width] = step.qkv
    apart = Step(spread[:, :width], step.batch, step.kv, step.q_size)
    assert torch.equal(attend(apart), attend(step))


def test_a_batch_serves_layers_of_different_windows(isa: str) -> None:
    scenario = lay_out(MIXED, Heads(8, 4, 64))
    step = scenario.on(NATIVE)
    for window in (33, 0, 130, 33, 0):
        assert torch.equal(
            attend(step, window=window), attend(scenario.on(NATIVE), window=window)
        ), window


# In a page of pairs the oldest token's may be half of one.
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_before_the_window_are_never_read(
    isa: str, dtype: torch.dtype, page_size: int
) -> None:
    sequences = [(1, 1, 700), (2, 4, 100)]
    scenario = lay_out(sequences, Heads(4, 2, 32), page_size=page_size, dtype=dtype)
    step = scenario.on(NATIVE)
    before = attend(step, window=51)
    plain = contents(step.kv)
    for row, oldest in ((0, 649), (1, 46)):
        at = torch.arange(oldest)
        pages = torch.from_numpy(scenario.host.page_table)[0, row, at // page_size].long()
        plain[:, :, pages, :, at % page_size] = float("nan")
    fill(step.kv, plain)
    assert torch.equal(attend(step, window=51), before)


def test_nan_in_one_sequence_stays_there(isa: str) -> None:
    scenario = lay_out(MIXED, Heads(8, 4, 64))
    scenario.q[75, 3] = float("nan")
    rows = attend(scenario.on(NATIVE)).isnan()
    assert rows[75, 3].all()
    rows[75, 3] = False
    assert not rows.any()


def test_several_threads_may_call_at_once(threads: None) -> None:
    _native.set_num_threads(3)
    scenarios = [lay_out(MIXED, Heads(8, 4, 64), seed=i) for i in range(2)]
    scenarios += [lay_out([(i, 1, 2000)], Heads(8, 4, 64)) for i in range(2)]
    steps = [scenario.on(NATIVE) for scenario in scenarios]
    expected = [attend(scenario.on(NATIVE)) for scenario in scenarios]

    def repeat(which: int) -> bool:
        return all(torch.equal(attend(steps[which]), expected[which]) for _ in range(30))

    with ThreadPoolExecutor(2 * len(steps)) as executor:
        assert all(executor.map(repeat, 2 * list(range(len(steps)))))


def test_a_batch_without_tokens_gives_no_rows() -> None:
    scenario = lay_out([(1, 0, 5)], Heads(2, 1, 16))
    assert attend(scenario.on(NATIVE)).shape == (0, 2, 16)


@backends
@pytest.mark.parametrize(
    ("array", "index", "value", "message"),
    [
        ("page_table", (0, 0, 1), 1000, "sequence 0 names page 1000 of 5"),
        ("page_table", (0, 0, 0), -1, "sequence 0 names page -1 of 5"),
        ("context_lens", 0, 65, "sequence 0 has a context of 65, but its page table ends at 64"),
        ("context_lens", 0, 1, "sequence 0 has 2 query tokens in a context of 1"),
        ("query_start", 1, 3, "query_start must run from 0 to the number of tokens, 2"),
        ("query_start", 0, 1, "query_start must run from 0 to the number of tokens, 2"),
        ("token_locations", (0, 1), -1, r"token_locations\[0, 1\] is -1, outside the 80 locations"),
        ("token_locations", (0, 0), 80, r"token_locations\[0, 0\] is 80, outside the 80 locations"),
        ("positions", 1, -1, r"positions\[1\] is -1"),
        ("logit_rows", 1, -1, r"logit_rows\[1\] is -1 of 2 tokens"),
        ("logit_rows", 0, 2, r"logit_rows\[0\] is 2 of 2 tokens"),
    ],
)
def test_impossible_batches_are_refused_by_name(
    backend: Backend, array: str, index: object, value: int, message: str
) -> None:
    scenario = lay_out([(1, 2, 40)], Heads(4, 2, 32))
    getattr(scenario.host, array)[index] = value
    with pytest.raises(ValueError, match=f"batch: {message}"):
        scenario.on(backend)


@backends
def test_a_sequence_of_fewer_than_no_tokens_is_refused(backend: Backend) -> None:
    scenario = lay_out([(1, 2, 40), (2, 1, 9)], Heads(4, 2, 32))
    scenario.host.query_start[1] = 5
    scenario.host.context_lens[0] = 48
    with pytest.raises(ValueError, match="sequence 1 has a negative number of query tokens"):
        scenario.on(backend)


@backends
def test_a_batch_belongs_to_the_pages_it_was_prepared_for(backend: Backend) -> None:
    step = lay_out([(1, 2, 40)], Heads(4, 2, 32)).on(backend)
    fewer = Step(step.qkv, step.batch, allocate(backend, 1, 4, 16, 2, 32, torch.float32), 128)
    with pytest.raises(ValueError, match="prepared for 5 pages of 16 tokens, got 4 of 16"):
        attend(fewer, backend)
    other = lay_out([(1, 2, 40)], Heads(4, 2, 32)).on(REFERENCE if backend is NATIVE else NATIVE)
    with pytest.raises(TypeError, match="batch must be one that this backend prepared"):
        attend(Step(step.qkv, other.batch, step.kv, 128), backend)


def test_kernels_know_their_own_pages_alone() -> None:
    step, other = (lay_out([(1, 2, 40)], Heads(4, 2, 32)).on(each) for each in BACKENDS)
    with pytest.raises(TypeError, match="kv must be one that this backend allocated"):
        attend(Step(step.qkv, step.batch, other.kv, 128))


@backends
def test_tensors_that_do_not_fit_are_refused_by_name(backend: Backend) -> None:
    step = lay_out([(1, 2, 40)], Heads(4, 2, 32)).on(backend)
    qkv, kind = step.qkv, AttentionKind(1)
    with pytest.raises(TypeError, match=r"qkv must be torch.float32 as the KV pages, got"):
        backend.paged_attention(qkv.half(), step.at, kind)
    widths = (qkv[:, :-32], qkv[:, :-1], qkv[:1], qkv[:, :128], qkv[0])
    shape = r"qkv must have shape \(2, \(Hq \+ 4\) \* 32\), Hq a multiple of 2, with dense rows on"
    for wrong in (*widths, qkv.T.contiguous().T, qkv.to("meta")):
        with pytest.raises(ValueError, match=shape):
            backend.paged_attention(wrong, step.at, kind)
    for layer in (1, -1):
        with pytest.raises(ValueError, match=f"layer must be from 0 to 0, got {layer}"):
            backend.paged_attention(qkv, step.at._replace(layer=layer), kind)
    for bounds in ((-1, 0.0), (0, -1.0), (0, float("nan"))):
        with pytest.raises(ValueError, match="window and soft_cap must be at least 0"):
            AttentionKind(1, *bounds)


def test_pages_that_kernels_do_not_have_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype must be float32 or bfloat16, got torch.float64"):
        allocate(NATIVE, 1, 1, 1, 1, 1, torch.float64)
    largest = "head_dim must be at most 256, or 1024 of latents with .* latent_rank 0, got 257"
    with pytest.raises(ValueError, match=largest):
        allocate(NATIVE, 1, 1, 1, 1, 257, torch.float32)
