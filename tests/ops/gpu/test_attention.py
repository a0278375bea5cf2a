"""Attention on a GPU, or in Triton's interpreter, against a float64 reference and against itself.

Tiles have 16 keys by default, so that short contexts have several tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve.ops.backend import AttentionKind, KVLayer
from aioserve.ops.gpu.attention import paged_attention
from aioserve.ops.gpu.attention_tiles import (
    AttentionTiles,
    Tile,
    attention_tiles,
    decode_splits,
    max_parts,
)
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.gpu_batch import GpuKVLayer
from tests.ops.contents import by_layer, contents, fill
from tests.ops.gpu.batches import GpuStep, on_gpu
from tests.ops.scenarios import REFERENCE, Heads, Scenario, lay_out, plain_cache
from tests.tiers import examples

SMALL = AttentionTiles(prefill=Tile(32, 16, 4, 1), decode=Tile(16, 16, 4, 1), part_keys=32)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Rounding of results and weights is half a unit of their last bit. Uncorrected, the interpreter
# truncates to bfloat16, where a GPU rounds.
ROUNDING = {
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7,
}

DECODES = [(1, 1, 1), (3, 1, 17), (5, 1, 75)]
# There is a prompt, and chunks behind a prefix, across tiles of keys and rows.
CHUNKS = [(2, 21, 21), (4, 9, 50), (6, 2, 33)]

Sequences = Sequence[tuple[int, int, int]]


def run(
    step: GpuStep, window: int = 0, soft_cap: float = 0.0, tiles: AttentionTiles = SMALL
) -> Tensor:
    """Compute attention, [T, Hq * D]."""
    scale = step.kv.head_dim**-0.5
    kind = AttentionKind(scale, window, soft_cap)
    return paged_attention(step.qkv, step.at, kind, tiles=tiles).cpu()


def reference(scenario: Scenario, window: int, soft_cap: float, *, magnitude: bool) -> Tensor:
    """Compute attention in float64; with `magnitude`, over the absolutes of values."""
    step = scenario.on(REFERENCE, wide=True)
    if magnitude:
        plain = contents(step.kv)
        plain[:, 1].abs_()
        fill(step.kv, plain)
    scale = step.kv.head_dim**-0.5
    return REFERENCE.paged_attention(step.qkv, step.at, AttentionKind(scale, window, soft_cap))


def check(scenario: Scenario, got: Tensor, window: int = 0, soft_cap: float = 0.0) -> None:
    expected = reference(scenario, window, soft_cap, magnitude=False)
    assert got.dtype == scenario.q.dtype
    assert got.shape == expected.shape
    limit = 1e-5 * (1 + expected.abs())
    if (rounding := ROUNDING.get(got.dtype)) is not None:
        magnitude = reference(scenario, window, soft_cap, magnitude=True)
        limit += 1.01 * rounding * (magnitude + 2 * expected.abs())
    error = (got.double() - expected).abs()
    assert bool((error <= limit).all()), f"{(error - limit).max()} beyond the limit"


# A tile of keys is a page of 16, and a part of a page of 64.
@pytest.mark.parametrize(
    ("page_size", "window", "soft_cap"),
    [(1, 0, 0.0), (3, 21, 0.0), (16, 0, 4.0), (64, 33, 4.0), (64, 0, 0.0)],
)
def test_a_mixed_batch_agrees_with_the_reference(
    device: torch.device, page_size: int, window: int, soft_cap: float
) -> None:
    scenario = lay_out([*DECODES, *CHUNKS], Heads(3, 1, 32), page_size=page_size)
    got = run(on_gpu(scenario, device), window, soft_cap)
    check(scenario, got, window, soft_cap)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("page_size", "window", "soft_cap"), [(1, 33, 0.0), (3, 0, 4.0), (16, 0, 0.0), (64, 21, 4.0)]
)
def test_split_decodes_agree_with_the_reference(
    device: torch.device, page_size: int, window: int, soft_cap: float
) -> None:
    scenario = lay_out(DECODES, Heads(3, 1, 32), page_size=page_size)
    for splits in (2, 5):
        got = run(on_gpu(scenario, device, num_splits=splits), window, soft_cap)
        check(scenario, got, window, soft_cap)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (Heads(2, 2, 80), torch.bfloat16),
        (Heads(8, 1, 96), torch.float16),
        (Heads(20, 1, 32), torch.float32),
        (Heads(1, 1, 256), torch.float32),
    ],
    ids=str,
)
def test_head_counts_and_sizes_agree_with_the_reference(
    device: torch.device, dtype: torch.dtype, heads: Heads
) -> None:
    scenario = lay_out([(1, 1, 40), (2, 5, 20)], heads, dtype=dtype, page_size=8)
    check(scenario, run(on_gpu(scenario, device, num_splits=2)))


@pytest.mark.parametrize(
    ("dtype", "target"), [(torch.float32, 90), (torch.float16, 80), (torch.bfloat16, 90)], ids=str
)
def test_tiles_of_devices_agree_with_the_reference(
    device: torch.device, dtype: torch.dtype, target: int
) -> None:
    tiles = attention_tiles(64, dtype, target)
    scenario = lay_out([(1, 1, 200), (2, 40, 150)], Heads(4, 1, 64), dtype=dtype, page_size=128)
    check(scenario, run(on_gpu(scenario, device, num_splits=2), tiles=tiles))


sequences = st.integers(1, 45).flatmap(
    lambda context: st.tuples(st.integers(1, 9), st.integers(1, context), st.just(context))
)


@settings(max_examples=examples(6))
@given(
    batch=st.lists(sequences, min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 3, 8]),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([16, 33, 48]),
    page_size=st.sampled_from([1, 2, 5, 16, 24, 32]),
    window=st.sampled_from([0, 1, 2, 16, 17, 31]),
    soft_cap=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from(DTYPES),
    splits=st.sampled_from([1, 2, 5]),
)
def test_any_batch_agrees_with_the_reference(
    device: torch.device,
    batch: list[tuple[int, int, int]],
    group: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
    splits: int,
) -> None:
    heads = Heads(group * kv_heads, kv_heads, head_dim)
    ordered = sorted(batch, key=lambda sequence: sequence[1])
    scenario = lay_out(ordered, heads, page_size=page_size, dtype=dtype)
    got = run(on_gpu(scenario, device, num_splits=splits), window, soft_cap)
    check(scenario, got, window, soft_cap)


def test_blocks_of_queries_make_up_a_long_prompt(device: torch.device) -> None:
    tiles = AttentionTiles(prefill=Tile(64, 64, 4, 1), decode=SMALL.decode)
    scenario = lay_out([(1, 1, 3), (2, 270, 300), (3, 129, 129)], Heads(3, 1, 32))
    for window in (0, 100):
        check(scenario, run(on_gpu(scenario, device), window, tiles=tiles), window)


# The longest context has more tiles of keys than the most parts, so that its parts are longer.
@pytest.mark.more
@pytest.mark.parametrize("window", [0, 100])
def test_a_row_is_the_same_with_any_number_of_splits(device: torch.device, window: int) -> None:
    tiles = SMALL._replace(part_keys=16)
    assert max_parts(1) * 16 < 1060
    scenario = lay_out([(1, 1, 1070), (2, 1, 16), (3, 1, 1)], Heads(1, 1, 16))
    whole = run(on_gpu(scenario, device), window, tiles=tiles)
    check(scenario, whole, window)
    for splits in (3, 70):
        got = run(on_gpu(scenario, device, num_splits=splits), window, tiles=tiles)
        assert torch.equal(got, whole), splits


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap"),
    [(torch.float32, 0, 0.0), (torch.float16, 0, 4.0), (torch.bfloat16, 21, 0.0)],
    ids=str,
)
def test_a_row_is_the_same_to_the_last_bit_in_any_batch(
    device: torch.device, dtype: torch.dtype, window: int, soft_cap: float
) -> None:
    heads = Heads(3, 1, 32)
    decode, chunk = (7, 1, 75), (8, 20, 50)
    alone = [
        run(on_gpu(lay_out([one], heads, dtype=dtype), device), window, soft_cap)
        for one in (decode, chunk)
    ]
    others = [(1, 1, 130), decode, (2, 1, 5), (3, 40, 40), chunk, (4, 3, 60)]
    for splits in (1, 4):
        scenario = lay_out(others, heads, dtype=dtype, seed=splits)
        got = run(on_gpu(scenario, device, num_splits=splits), window, soft_cap)
        assert torch.equal(got[1:2], alone[0]), splits
        assert torch.equal(got[43:63], alone[1]), splits


@pytest.mark.parametrize("window", [0, 21])
def test_a_row_is_the_same_to_the_last_bit_in_any_chunk_and_page_size(
    device: torch.device, window: int
) -> None:
    heads = Heads(3, 1, 32)
    whole = run(on_gpu(lay_out([(7, 60, 60)], heads), device), window)
    for page_size, chunk, end in [(1, 7, 60), (16, 2, 17), (32, 33, 33), (5, 20, 48)]:
        scenario = lay_out([(7, chunk, end)], heads, page_size=page_size)
        assert torch.equal(run(on_gpu(scenario, device), window), whole[end - chunk : end])


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_attends_to_nothing_or_to_a_page_of_nobody(
    device: torch.device, splits: int
) -> None:
    sequences = [(1, 1, 70), (2, 1, 20)]
    heads = Heads(4, 2, 32)
    alone = run(on_gpu(lay_out(sequences, heads), device, num_splits=splits))
    scenario = lay_out([*sequences, (3, 1, 1), (4, 1, 1)], heads)
    scenario.host.context_lens[3] = 0
    step = on_gpu(scenario, device, num_splits=splits)
    # The dummy page was never written.
    step.kv.storage[scenario.host.page_table[0, 2, 0]] = float("nan")
    rows = run(step)
    assert torch.equal(rows[:2], alone)
    assert rows[2].isnan().all()
    assert not rows[3].any()


def test_keys_before_the_window_are_never_read(device: torch.device) -> None:
    scenario = lay_out([(1, 1, 75), (2, 4, 60)], Heads(4, 2, 32), page_size=4)
    for splits in (1, 3):
        step = on_gpu(scenario, device, num_splits=splits)
        before = run(step, 21)
        for row, oldest in ((0, 54), (1, 36)):
            at = np.arange(oldest)
            pages = torch.from_numpy(scenario.host.page_table[0, row, at // 4]).long()
            by_layer(step.kv)[:, :, pages, :, at % 4] = float("nan")
        assert torch.equal(run(step, 21), before)


# The interpreter uses numpy's maximum, which warns.
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nan_in_one_row_stays_there(device: torch.device) -> None:
    scenario = lay_out([*DECODES, *CHUNKS], Heads(4, 2, 32))
    for row in (2, 10):
        scenario.q[row, 3] = float("nan")
    rows = run(on_gpu(scenario, device)).unflatten(1, (4, 32)).isnan()
    for row in (2, 10):
        assert rows[row, 3].all()
        rows[row, 3] = False
    assert not rows.any()


def test_rows_of_tokens_and_of_the_page_table_may_lie_apart(device: torch.device) -> None:
    scenario = lay_out([*DECODES, *CHUNKS], Heads(4, 2, 32))
    step = on_gpu(scenario, device, num_splits=2)
    tokens, width = step.qkv.shape
    qkv = torch.full((tokens, width + 24), float("nan"), device=device)
    qkv[:, :width] = step.qkv
    (page_table,) = step.batch.page_tables
    sequences, pages = page_table.shape
    table = torch.full((sequences, pages + 9), 2**30, dtype=torch.int32, device=device)
    table[:, :pages] = page_table
    batch = dataclasses.replace(step.batch, page_tables=(table[:, :pages],))
    assert torch.equal(run(GpuStep(qkv[:, :width], batch, step.kv)), run(step))


def test_layers_have_pages_of_their_own(device: torch.device) -> None:
    first, second = (lay_out([(name, 1, 40), (3, 5, 20)], Heads(2, 1, 32)) for name in (1, 2))
    steps = [on_gpu(scenario, device) for scenario in (first, second)]
    kv = plain_cache(torch.cat([contents(step.kv) for step in steps]), device)
    for layer, step in enumerate(steps):
        kind, at = AttentionKind(0.3), GpuKVLayer(step.batch, kv, layer)
        got = paged_attention(step.qkv, at, kind, tiles=SMALL)
        alone = paged_attention(step.qkv, step.at, kind, tiles=SMALL)
        assert torch.equal(got, alone)


@pytest.mark.parametrize("rows", [[], [0, 2, 3, 23], [5, 5, 1]])
def test_logit_rows_alone_are_those_of_all_rows(device: torch.device, rows: list[int]) -> None:
    scenario = lay_out([*DECODES, *CHUNKS], Heads(2, 1, 16))
    host = dataclasses.replace(scenario.host, logit_rows=np.array(rows, np.int64))
    step = on_gpu(dataclasses.replace(scenario, host=host), device)
    backend, at, kind = CudaBackend(device), KVLayer(*step.at), AttentionKind(0.25)
    whole = backend.paged_attention(step.qkv, at, kind)
    got = backend.paged_attention(step.qkv, at, kind, logit_rows_only=True)
    check(scenario, whole.cpu())
    assert torch.equal(got, whole[rows])


def test_a_batch_without_tokens_gives_no_rows(device: torch.device) -> None:
    step = on_gpu(lay_out([(1, 0, 5)], Heads(2, 1, 16)), device)
    assert run(step).shape == (0, 32)


def test_a_scale_that_is_not_above_0_is_refused(device: torch.device) -> None:
    step = on_gpu(lay_out([(1, 1, 5)], Heads(2, 1, 16)), device)
    with pytest.raises(ValueError, match="scale must be above 0, got -1"):
        paged_attention(step.qkv, step.at, AttentionKind(-1), tiles=SMALL)


@given(
    decodes=st.integers(0, 2000), kv_heads=st.integers(1, 128), max_context=st.integers(0, 200_000)
)
def test_splits_fill_the_device_and_not_more(decodes: int, kv_heads: int, max_context: int) -> None:
    splits = decode_splits(decodes, kv_heads, max_context)
    assert 1 <= splits <= max_parts(kv_heads)
    if splits > 1:
        assert (splits - 1) * 128 < max_context
        assert (splits - 1) * decodes * kv_heads <= 4096


def test_few_decodes_are_split_and_many_are_not() -> None:
    assert decode_splits(1, 8, 100) == 1
    assert decode_splits(1, 8, 1000) == 8
    assert decode_splits(1, 8, 100_000) == 32
    assert decode_splits(256, 8, 2000) == 1
    assert decode_splits(256, 8, 100_000) == 2
