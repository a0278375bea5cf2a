"""The values that ops work on, and the choice of a backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aioserve.errors import ConfigError
from aioserve.ops import KVCache, bytes_per_page, select
from tests.ops.scenarios import Heads, lay_out


def test_a_cache_is_laid_out_by_layer_and_page() -> None:
    cache = KVCache.allocate(3, 7, 16, 2, 32, torch.bfloat16)
    assert cache.storage.shape == (3, 2, 7, 2, 16, 32)
    k_pages, v_pages = cache.layer(2)
    assert k_pages.shape == v_pages.shape == (7, 2, 16, 32)
    v_pages[6, 1, 15, 31] = 5
    assert cache.storage[2, 1, 6, 1, 15, 31] == 5
    sizes = (cache.num_layers, cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim)
    assert sizes == (3, 7, 16, 2, 32)
    assert cache.dtype is torch.bfloat16


def test_bytes_per_page_add_up_to_the_storage() -> None:
    cache = KVCache.allocate(3, 7, 16, 2, 32, torch.bfloat16)
    assert 7 * cache.bytes_per_page == cache.storage.nbytes
    assert bytes_per_page(3, 16, 2, 32, torch.bfloat16) == cache.bytes_per_page


def test_a_cache_of_no_pages_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        KVCache.allocate(3, 0, 16, 2, 32, torch.float32)


def test_a_batch_refuses_tensors_that_do_not_fit() -> None:
    batch = lay_out([(1, 2, 40), (2, 1, 3)], Heads(2, 1, 16)).batch
    with pytest.raises(TypeError, match=r"token_locations must be torch.int64, got torch.int32"):
        dataclasses.replace(batch, token_locations=batch.token_locations.int())
    with pytest.raises(ValueError, match=r"query_start must have shape \(3,\), got \(2,\)"):
        dataclasses.replace(batch, query_start=batch.query_start[:2])
    with pytest.raises(ValueError, match="page_table must be contiguous"):
        dataclasses.replace(batch, page_table=batch.page_table[:, ::2])


def test_backends_offer_the_same_ops() -> None:
    for name in ("native", "reference"):
        ops = select(name)
        assert ops.name == name
        assert all(callable(getattr(ops, f.name)) for f in dataclasses.fields(ops)[1:])


def test_the_environment_decides_only_where_the_caller_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert select("auto").name == "native"
    monkeypatch.setenv("AIOSERVE_OPS", "reference")
    assert select("auto").name == "reference"
    assert select("native").name == "native"
    monkeypatch.setenv("AIOSERVE_OPS", "magic")
    with pytest.raises(ConfigError, match="AIOSERVE_OPS must be one of auto, native, reference"):
        select()
    with pytest.raises(ConfigError, match=r"ops must be one of .* got 'torch'"):
        select("torch")
