"""Layouts of models whose layers see everything, a window, or some of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.paging.format import KV_FORMATS, KVEntry
from aioserve.paging.layout import KVGroup, KVLayout, LayerKV, kv_layout

ENTRY = KVEntry(KV_FORMATS["bfloat16"], 2, 8)
LATENT = replace(ENTRY, latent=True)


def layers_of(pattern: str, window: int = 8) -> list[LayerKV]:
    """A layer for each letter: f sees everything, w a window, l keeps a latent vector."""
    entries = {"f": ENTRY, "w": ENTRY, "l": LATENT}
    return [LayerKV(entries[one], window if one == "w" else 0) for one in pattern]


def groups_of(layout: KVLayout) -> list[tuple[int, ...]]:
    return [group.layers for group in layout.groups]


@pytest.mark.parametrize("pattern", ["f", "ffff", "llllll"])
def test_layers_that_see_everything_are_one_group(pattern: str) -> None:
    layout = kv_layout(layers_of(pattern), 4096)
    assert groups_of(layout) == [tuple(range(len(pattern)))]
    assert layout.layers_per_page == len(pattern)
    assert layout.groups[0].kind == ("latent" if "l" in pattern else "full")
    assert (layout.num_window_groups, layout.window) == (0, 0)
    token_bytes = 32 if "l" in pattern else 64
    assert layout.bytes_per_page(16) == 16 * token_bytes * len(pattern)


def test_gemma_3_has_five_window_groups_of_as_many_layers_as_see_everything() -> None:
    layout = kv_layout(layers_of("wwwwwf" * 3, 512), 32_768)
    assert groups_of(layout)[:2] == [(5, 11, 17), (0, 1, 2)]
    assert layout.layers_per_page == 3
    assert [group.kind for group in layout.groups] == ["full"] + ["window"] * 5
    assert layout.window == 512
    assert layout.places[5] == (0, 0)
    assert layout.places[4] == (2, 1)


def test_alternating_layers_are_two_groups() -> None:
    assert groups_of(kv_layout(layers_of("wfwfwf"), 64)) == [(1, 3, 5), (0, 2, 4)]


def test_an_eighth_of_the_layers_keeps_everything_where_all_have_a_window() -> None:
    layout = kv_layout(layers_of("w" * 32), 4096)
    assert groups_of(layout) == [tuple(range(at, at + 4)) for at in range(0, 32, 4)]
    assert layout.groups[0].kind == "full"
    assert layout.groups[0].window == 0


def test_the_last_group_may_have_fewer_layers() -> None:
    layout = kv_layout(layers_of("wwwwwf" * 4 + "ww", 512), 32_768)
    assert layout.layers_per_page == 4
    assert [len(group.layers) for group in layout.groups] == [4, 4, 4, 4, 4, 4, 2]


def test_groups_whose_padding_takes_more_than_they_save_are_one() -> None:
    assert kv_layout(layers_of("ffwww", 512), 600).num_groups == 1
    assert kv_layout(layers_of("ffwww", 512), 6000).num_groups > 1


@pytest.mark.parametrize("max_model_len", [8, 7])
def test_a_window_that_no_context_outgrows_is_none(max_model_len: int) -> None:
    assert kv_layout(layers_of("wf", 8), max_model_len).num_groups == 1


def test_window_groups_keep_the_largest_window_of_their_layers() -> None:
    layers = [LayerKV(ENTRY), LayerKV(ENTRY, 4), LayerKV(ENTRY, 16), LayerKV(ENTRY, 512)]
    layout = kv_layout(layers, 256)
    assert groups_of(layout) == [(0, 3), (1, 2)]
    assert layout.window == 16


def test_one_group_can_be_asked_for() -> None:
    layout = kv_layout(layers_of("wwwwwf"), 4096, grouped=False)
    assert groups_of(layout) == [tuple(range(6))]
    assert layout.window == 0


@given(st.text("fw", min_size=1, max_size=70), st.integers(1, 600), st.integers(1, 5000))
def test_every_layer_has_a_place_and_no_layout_takes_more_than_one_group(
    pattern: str, window: int, max_model_len: int
) -> None:
    layout = kv_layout(layers_of(pattern, window), max_model_len)
    assert layout.num_layers == len(pattern) == len(set(layout.places))
    for layer, (group, index) in enumerate(layout.places):
        assert layout.groups[group].layers[index] == layer
        if pattern[layer] == "f":
            assert group == 0
        if group:
            assert layout.groups[group].window == window < max_model_len
    tokens = max_model_len + layout.num_window_groups * layout.window
    assert tokens * layout.layers_per_page <= max_model_len * len(pattern)


@pytest.mark.parametrize(
    ("layers", "max_model_len", "why"),
    [
        ([], 16, "must not be empty"),
        (layers_of("f"), 0, "max_model_len must be at least 1, got 0"),
        (layers_of("fl"), 16, "the same entry of a token"),
        ([LayerKV(ENTRY), LayerKV(replace(ENTRY, head_dim=16))], 16, "the same entry of a token"),
        (
            [LayerKV(ENTRY), LayerKV(replace(ENTRY, format=KV_FORMATS["float16"]))],
            16,
            "the same entry of a token",
        ),
    ],
)
def test_layers_that_share_no_pages_are_refused(
    layers: list[LayerKV], max_model_len: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        kv_layout(layers, max_model_len)


@pytest.mark.parametrize(
    ("groups", "per_page", "why"),
    [
        ((), 1, "each layer from 0 on once"),
        ((KVGroup("full", (0, 2), ENTRY),), 2, "each layer from 0 on once"),
        ((KVGroup("full", (0, 1), ENTRY),), 1, "1 to 1 layers"),
        ((KVGroup("window", (0,), ENTRY, 4),), 1, "group 0 must keep all positions"),
        (
            (KVGroup("full", (0,), ENTRY), KVGroup("full", (1,), ENTRY)),
            1,
            "and those behind it one window",
        ),
        (
            (KVGroup("full", (0,), ENTRY), KVGroup("full", (1,), ENTRY, 4)),
            1,
            "must be of kind window",
        ),
        ((KVGroup("full", (0,), ENTRY), KVGroup("window", (1,), LATENT, 4)), 1, "one entry"),
    ],
)
def test_groups_that_make_no_layout_are_refused(
    groups: tuple[KVGroup, ...], per_page: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        KVLayout(groups, per_page)
