"""Layers that keep only a window compute the bits of layers that keep everything."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from aioserve.ops import HostBatch, KVShape
from aioserve.ops.backend import AttentionKind, KVLayer
from aioserve.paging.format import KV_FORMATS, KVEntry
from aioserve.paging.layout import KVLayout, LayerKV, kv_layout
from tests.ops.contents import contents
from tests.ops.grouped_scenes import GroupedScene, grouped_scenes
from tests.ops.scenarios import BACKENDS, NATIVE, random
from tests.tiers import examples

backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
ENTRY = KVEntry(KV_FORMATS["float32"], 2, 16)
TWO_GROUPS = kv_layout([LayerKV(ENTRY), LayerKV(ENTRY, 5)], 1000)


def shape(layout: KVLayout, num_pages: int = 12, page_size: int = 4) -> KVShape:
    return KVShape(layout, num_pages, page_size)


@backends
@settings(deadline=None, max_examples=examples(20))
@given(scene=grouped_scenes())
def test_groups_give_the_bits_of_one_group_and_read_nothing_before_a_window(backend, scene):
    check(backend, scene)


def test_every_instruction_set_reads_nothing_before_a_window(isa):
    for page_size in (1, 3, 16):
        for dtype in (torch.float32, torch.bfloat16):
            sequences = ((1, 60), (1, 75), (7, 70), (20, 80))
            check(NATIVE, GroupedScene((0, 21, 0, 21, 9), sequences, page_size, dtype))


def check(backend, scene):
    rows, written = scene.attended(backend, grouped=False)
    assert not any(of_layer.isnan().any() for of_layer in rows)
    of_groups, in_groups = scene.attended(backend, grouped=True)
    assert all(map(torch.equal, of_groups, rows))
    assert all(map(torch.equal, in_groups, written))


@backends
def test_a_page_is_copied_whole_whatever_group_it_is_of(backend):
    kv, host_kv = (backend.allocate_kv(shape(TWO_GROUPS, num_pages)) for num_pages in (12, 3))
    for cache in (kv, host_kv):
        cache.storage.copy_(random(*cache.storage.shape, seed=cache.num_pages))
    page = kv.storage[7].clone()
    backend.copy_pages([kv, host_kv], np.array([(0, 7, 1, 2, 4), (1, 2, 0, 9, 4)], np.int32))
    assert torch.equal(host_kv.storage[2], page)
    assert torch.equal(kv.storage[9], page)


def step(layout: KVLayout) -> HostBatch:
    table = np.arange(3 * layout.num_groups, dtype=np.int32).reshape(layout.num_groups, 1, 3)
    return HostBatch.laid_out(np.array([2]), np.array([12]), table, 4)


@backends
@pytest.mark.parametrize(
    ("group", "index", "page", "refused"),
    [(0, 0, 99, True), (1, 0, 99, False), (1, 1, 99, True), (1, 2, -1, True)],
)
def test_table_entries_are_checked_from_the_window_on(backend, group, index, page, refused):
    host = step(TWO_GROUPS)  # tokens 10 and 11, which see positions from 6 on
    host.page_table[group, 0, index] = page
    kv = backend.allocate_kv(shape(TWO_GROUPS))
    if not refused:
        backend.prepare(host, kv, backend.allocate_slots(1))
        return
    with pytest.raises(ValueError, match=f"sequence 0 names page {page} of 12"):
        backend.prepare(host, kv, backend.allocate_slots(1))


@backends
def test_a_location_of_any_group_is_checked(backend):
    host = step(TWO_GROUPS)
    host.token_locations[1, 1] = 48
    with pytest.raises(ValueError, match=re.escape("token_locations[1, 1] is 48, outside the 48")):
        backend.prepare(host, backend.allocate_kv(shape(TWO_GROUPS)), backend.allocate_slots(1))


@backends
def test_tables_of_other_groups_are_refused(backend):
    one = kv_layout([LayerKV(ENTRY)] * 2, 1)
    kv = backend.allocate_kv(shape(one))
    with pytest.raises(ValueError, match="has page tables of 2 groups, and the pages are of 1"):
        backend.prepare(step(TWO_GROUPS), kv, backend.allocate_slots(1))


@backends
@pytest.mark.parametrize("window", [0, 6])
def test_a_layer_that_sees_more_than_its_pages_keep_is_refused(backend, window):
    kv = backend.allocate_kv(shape(TWO_GROUPS))
    batch = backend.prepare(step(TWO_GROUPS), kv, backend.allocate_slots(1))
    qkv = random(2, 8 * 16)
    backend.paged_attention(qkv, KVLayer(batch, kv, 0), AttentionKind(0.3, window))
    backend.paged_attention(qkv, KVLayer(batch, kv, 1), AttentionKind(0.3, 5))
    with pytest.raises(ValueError, match=f"the 5 positions that the pages of layer 1 .*{window}$"):
        backend.paged_attention(qkv, KVLayer(batch, kv, 1), AttentionKind(0.3, window))


@backends
def test_a_batch_is_used_with_pages_of_the_groups_that_it_was_prepared_for(backend):
    other = kv_layout([LayerKV(ENTRY), LayerKV(ENTRY, 9)], 1000)
    kv = backend.allocate_kv(shape(TWO_GROUPS))
    batch = backend.prepare(step(TWO_GROUPS), kv, backend.allocate_slots(1))
    at = KVLayer(batch, backend.allocate_kv(shape(other)), 1)
    with pytest.raises(ValueError, match="was prepared for pages of other groups"):
        backend.paged_attention(random(2, 8 * 16), at, AttentionKind(0.3, 5))


def test_unused_room_of_a_page_is_part_of_it():
    layout = kv_layout([LayerKV(ENTRY)] * 2 + [LayerKV(ENTRY, 5)] * 5, 1000)
    assert [len(group.layers) for group in layout.groups] == [2, 2, 2, 1]
    cache = NATIVE.allocate_kv(shape(layout))
    assert contents(cache).shape == (2, 2, 12, 2, 4, 16)
    assert cache.bytes_per_page == shape(layout).bytes_per_page == cache.storage.nbytes // 12
