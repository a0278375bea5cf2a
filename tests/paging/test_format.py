"""Formats of KV: what entries and pages weigh by their planes, one of scales included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.kv.namespace import KVContent, cache_key
from aioserve.paging.format import COUNTED_KV_FORMATS, KV_FORMATS, KVEntry, KVFormat, KVPlane
from aioserve.paging.layout import LayerKV, kv_layout

TWO_PLANES = KVFormat(
    "two planes", (KVPlane("values", "int8", 1, step_bytes=4), KVPlane("scales", "float16", 2, 16))
)
"""Eight bits, and a scale for every 16 of them."""
ONE_SCALE = KVFormat(
    "one scale", (KVPlane("values", "int8", 1), KVPlane("scales", "float32", 4, dims_per_item=0))
)
"""Eight bits, and a scale for each head's key or value."""


@pytest.mark.parametrize(("name", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_floats_are_one_plane_of_values(name: str, item_bytes: int) -> None:
    kept = KV_FORMATS[name]
    assert [plane.name for plane in kept.planes] == ["values"]
    assert (kept.name, str(kept), kept.values.dtype) == (name, name, name)
    assert kept.head_bytes(64) == 64 * item_bytes
    assert KVEntry(kept, 8, 64).num_bytes == 2 * 8 * 64 * item_bytes
    assert KVEntry(kept, 1, 64, latent=True).num_bytes == 64 * item_bytes


def test_an_odd_head_fills_its_last_step() -> None:
    assert KV_FORMATS["bfloat16"].head_bytes(31) == 64
    assert KV_FORMATS["float32"].head_bytes(31) == 124
    assert COUNTED_KV_FORMATS["int8"].head_bytes(31) == 32


@pytest.mark.parametrize(
    ("kept", "head_dim", "expected"),
    [(TWO_PLANES, 64, 64 + 4 * 2), (TWO_PLANES, 30, 32 + 2 * 2), (ONE_SCALE, 30, 30 + 4)],
)
def test_scales_are_counted_beside_the_values(kept: KVFormat, head_dim: int, expected: int) -> None:
    assert kept.head_bytes(head_dim) == expected
    assert KVEntry(kept, 3, head_dim).num_bytes == 2 * 3 * expected


@given(
    kept=st.sampled_from([*COUNTED_KV_FORMATS.values(), TWO_PLANES, ONE_SCALE]),
    heads=st.integers(1, 9),
    head_dim=st.sampled_from([16, 64, 128]),
    page_size=st.integers(1, 64),
    pattern=st.text("fw", min_size=1, max_size=24),
    latent=st.booleans(),
)
def test_a_page_is_the_sum_of_its_planes(
    kept: KVFormat, heads: int, head_dim: int, page_size: int, pattern: str, latent: bool
) -> None:
    entry = KVEntry(kept, heads, head_dim, latent)
    layers = [LayerKV(entry, 8 if one == "w" else 0) for one in pattern]
    layout = kv_layout(layers, 4096)
    assert {group.entry.format for group in layout.groups} == {kept}
    of_planes = [
        layout.layers_per_page * np.prod(entry.page_shape(plane, page_size)) * plane.item_bytes
        for plane in kept.planes
    ]
    assert layout.bytes_per_page(page_size) == sum(of_planes)


def test_caches_of_different_formats_share_no_key() -> None:
    keys = {
        cache_key(
            KVContent(
                weights=b"w",
                computation=b"c",
                dtype="bfloat16",
                activation_quantization="none",
                kv_format=kept,
                page_size=16,
                kernels="native avx2",
            ),
            b"",
            np.array([1, 2], np.int32),
        )
        for kept in (*KV_FORMATS.values(), TWO_PLANES, ONE_SCALE)
    }
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("planes", "why"),
    [
        ((), "planes must be at least one"),
        ((KVPlane("values", "int8", 1),) * 2, "of different names"),
        ((KVPlane("values", "int8", 0),), "item_bytes and step_bytes must be at least 1"),
        ((KVPlane("values", "int8", 1, step_bytes=0),), "item_bytes and step_bytes must be at"),
        ((KVPlane("values", "int8", 1, dims_per_item=-1),), "dims_per_item at least 0"),
    ],
)
def test_planes_that_make_no_format_are_refused(planes: tuple[KVPlane, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KVFormat("bad", planes)
