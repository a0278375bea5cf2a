"""Values that ops work on, and the choice of a backend."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from aioserve.errors import ConfigError
from aioserve.ops import Backend, KVShape, SampleRows, backend_named
from aioserve.ops.kv_cache import PlainKVCache
from aioserve.paging.format import KVEntry, KVFormat, KVPlane
from aioserve.paging.layout import LayerKV, kv_layout
from tests.ops.contents import fill
from tests.ops.scenarios import BACKENDS, NATIVE, Heads, allocate, lay_out, one_group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_lie_in_steps_of_four_bytes_by_token_within(dtype: torch.dtype) -> None:
    cache = allocate(NATIVE, 3, 7, 16, 2, 32, dtype)
    per_step = 4 // dtype.itemsize
    assert cache.storage.shape == (7, 3, 2, 2, 16 * 32)
    plain = torch.zeros(3, 2, 7, 2, 16, 32)
    plain[2, 0, 6, 1, 15, 31] = 5
    fill(cache, plain)
    assert cache.storage[6, 2, 0, 1].nonzero().item() == 16 * 32 - 1
    plain[2, 0, 6, 1, 15, 31] = 0
    plain[2, 0, 6, 1, 3, per_step] = 5
    fill(cache, plain)
    assert cache.storage[6, 2, 0, 1].nonzero().item() == (16 + 3) * per_step
    sizes = (cache.num_layers, cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim)
    assert sizes == (3, 7, 16, 2, 32)
    assert cache.dtype is dtype


@pytest.mark.parametrize(
    ("dtype", "page_size", "at"),
    [
        (torch.float32, 16, 3 * 32 + 5),
        (torch.bfloat16, 16, (1 * 32 + 5) * 2 + 1),
        (torch.bfloat16, 5, 3 * 32 + 5),
    ],
)
def test_values_lie_in_rows_or_in_pairs_of_tokens(
    dtype: torch.dtype, page_size: int, at: int
) -> None:
    cache = allocate(NATIVE, 1, 2, page_size, 2, 32, dtype)
    plain = torch.zeros(1, 2, 2, 2, page_size, 32)
    plain[0, 1, 1, 1, 3, 5] = 5
    fill(cache, plain)
    assert cache.storage[1, 0, 1, 1].nonzero().item() == at
    assert int(cache.storage.count_nonzero()) == 1


@pytest.mark.parametrize("head_dim", [31, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_per_page_add_up_to_the_storage(dtype: torch.dtype, head_dim: int) -> None:
    cache = allocate(NATIVE, 3, 7, 16, 2, head_dim, dtype)
    assert 7 * cache.bytes_per_page == cache.storage.nbytes
    assert KVShape(one_group(3, 2, head_dim, dtype), 7, 16).bytes_per_page == cache.bytes_per_page


def test_a_cache_of_no_pages_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        allocate(NATIVE, 3, 0, 16, 2, 32, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_format_without_kernels_is_refused_by_name(backend: Backend) -> None:
    planes = KVPlane("values", "float32", 4), KVPlane("scales", "float32", 4, dims_per_item=0)
    entry = KVEntry(KVFormat("scaled", planes), 2, 8)
    shape = KVShape(kv_layout([LayerKV(entry)] * 3, 1), 2, 4)
    assert shape.bytes_per_page == 4 * 3 * 2 * 2 * (8 + 1) * 4
    with pytest.raises(ValueError, match=r"values alone, got scaled with \['values', 'scales'\]"):
        backend.allocate_kv(shape)


def test_storage_of_another_shape_is_no_cache() -> None:
    shape = KVShape(one_group(3, 2, 8, torch.float32), 2, 4)
    PlainKVCache(torch.zeros(2, 3, 2, 2, 4, 8), shape)
    for storage in (torch.zeros(3, 2, 2, 2, 4, 8), torch.zeros(2, 3, 2, 2, 4, 8).half()):
        with pytest.raises(ValueError, match=r"storage must be torch.float32 of shape \(2, 3, 2"):
            PlainKVCache(storage, shape)
    with pytest.raises(ValueError, match="storage must be contiguous"):
        PlainKVCache(torch.zeros(2, 3, 2, 2, 8, 4).mT, shape)


def test_a_batch_refuses_arrays_that_do_not_fit() -> None:
    batch = lay_out([(1, 2, 40), (2, 1, 3)], Heads(2, 1, 16)).host
    with pytest.raises(TypeError, match=r"token_locations must be int64, got int32"):
        dataclasses.replace(batch, token_locations=batch.token_locations.astype(np.int32))
    with pytest.raises(ValueError, match=r"query_start must have shape \(3,\), got \(2,\)"):
        dataclasses.replace(batch, query_start=batch.query_start[:2])
    with pytest.raises(ValueError, match="page_table must be contiguous"):
        dataclasses.replace(batch, page_table=batch.page_table[:, :, ::2])


def test_rows_at_other_positions_are_the_same_otherwise() -> None:
    rows = SampleRows(
        slots=np.array([4, 2]),
        columns={
            "temperature": np.array([0.5, 0.0]),
            "top_k": np.array([3, 0]),
            "top_p": np.array([0.9, 1.0]),
            "min_p": np.array([0.1, 0.0]),
            "typical_p": np.array([0.8, 1.0]),
        },
        seeds=np.array([7, 8], np.uint64),
        positions=np.array([10, 20], np.uint64),
    )
    later = np.array([11, 21], np.uint64)
    expected = dataclasses.replace(rows, positions=later)
    found = rows.at(later)
    for name in SampleRows.__slots__:
        assert getattr(found, name) is getattr(expected, name)
    assert rows.positions.tolist() == [10, 20]
    with pytest.raises(TypeError, match=r"positions must be uint64, got int64"):
        rows.at(np.array([11, 21]))
    with pytest.raises(ValueError, match=r"positions must have shape \(2,\), got \(3,\)"):
        rows.at(np.zeros(3, np.uint64))
    assert rows.arrays().keys() == {"slots", *rows.columns, "seeds", "positions"}
    columns = {**rows.columns, "top_p": rows["top_p"].astype(np.float32)}
    with pytest.raises(TypeError, match=r"^top_p must be float64, got float32$"):
        dataclasses.replace(rows, columns=columns)
    del columns["top_p"]
    with pytest.raises(ValueError, match=r"^columns must be temperature, .*typical_p, got "):
        dataclasses.replace(rows, columns=columns)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_pending_tokens_are_those_of_their_slots_and_the_host_arrays_stay(backend) -> None:
    scenario = lay_out([(1, 2, 40), (2, 1, 3)], Heads(2, 1, 16))
    host = dataclasses.replace(
        scenario.host,
        token_ids=np.array([5, -1, -1]),
        pending_rows=np.array([1, 2]),
        pending_slots=np.array([3, 0]),
    )
    kv = allocate(backend, 1, scenario.num_pages, 16, 1, 16, torch.float32)
    last_tokens = backend.allocate_slots(4)
    last_tokens[:] = torch.arange(70, 74)
    batch = backend.prepare(host, kv, last_tokens)
    assert batch.token_ids.tolist() == [5, 73, 70]
    assert host.token_ids.tolist() == [5, -1, -1]
    assert batch.positions.tolist() == [38, 39, 2]
    assert batch.end_position == 40


def test_the_environment_decides_only_where_the_caller_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AIOSERVE_OPS", raising=False)
    assert backend_named("auto").name == "native"
    monkeypatch.setenv("AIOSERVE_OPS", "reference")
    assert backend_named("auto").name == "reference"
    assert backend_named("native").name == "native"
    for same_as_unset in ("auto", ""):
        monkeypatch.setenv("AIOSERVE_OPS", same_as_unset)
        assert backend_named().name == "native"
    monkeypatch.setenv("AIOSERVE_OPS", "magic" * 10_000)
    with pytest.raises(ConfigError, match="AIOSERVE_OPS must be one of auto, native, ref") as found:
        backend_named()
    assert len(str(found.value)) < 1000
    assert backend_named("reference").name == "reference"  # what it names isn't asked for
    with pytest.raises(ConfigError, match=r"backend must be one of auto, .* got 'torch'"):
        backend_named("torch")
