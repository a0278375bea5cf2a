"""Rooflines worked out by hand, and counted out one token and one expert at a time."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve.capacity.hardware import Hardware
from aioserve.capacity.models import ExpertsShape, ModelShape
from aioserve.errors import ConfigError
from aioserve.models.config import DecoderConfig
from aioserve.simulation.roofline import RooflineCost
from aioserve.steps.pages import PageCopy
from tests.parity.tiny_models import CONFIGS
from tests.simulation.test_cost import step

MODEL = ModelShape(
    layer_params=900,
    head_params=100,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
MACHINE = Hardware("machine", 1e6, 1e6, 10**9, 0.5, 1.0, 1.0)
READER = Hardware("reader", 1e15, 1.0, 10**9, 0.0, 1.0, 1.0)
"""A byte a second, and arithmetic for nothing."""
COMPUTER = Hardware("computer", 1.0, 1e15, 10**9, 0.0, 1.0, 1.0)


def test_a_token_reads_all_weights_and_its_context() -> None:
    assert MODEL.kv_bytes_per_token == 128
    # Memory: 2 * 1000 + 128 * (10 read + 1 written); arithmetic: 2 * 1000 + 4 * 64 * 10.
    assert RooflineCost(MODEL, MACHINE).step_seconds(step((9, 1))) == 0.5 + 4560e-6


def test_a_long_chunk_is_bound_by_arithmetic() -> None:
    slow = Hardware("slow", 1e3, 1e9, 10**9, 0.5, 1.0, 1.0)
    # Each token attends to itself and all before it: 11 + 12 + 13 pairs.
    flops = 2 * (900 * 3 + 100) + 4 * 2 * 4 * 8 * 36
    assert RooflineCost(MODEL, slow).step_seconds(step((10, 3))) == 0.5 + flops / 1e3


def test_forks_only_sample_and_copies_move_memory() -> None:
    cost = RooflineCost(MODEL, MACHINE)
    # A fork samples once more, and that is all.
    assert cost.step_seconds(step((9, 1), (10, 0))) == 0.5 + (4560 + 200) * 1e-6
    copies = (PageCopy(0, 0, 0, 1, 3), PageCopy(0, 0, 1, 1, 4))
    assert cost.step_seconds(step((9, 1), copies=copies)) == 0.5 + (3408 + 1280) * 1e-6


# -- windows


chunks = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=4)


@given(chunks, st.lists(st.integers(1, 50), max_size=3))
def test_a_layer_with_a_window_reads_and_attends_to_what_it_sees(
    items: list[tuple[int, int]], windows: list[int]
) -> None:
    model = replace(MODEL, num_layers=3, windows=tuple(windows))
    read = pairs = 0
    for window in (*windows, *[1 << 40] * (3 - len(windows))):
        for start, count in items:
            end = start + count
            first_seen = max(0, start + 1 - window)
            read += len(range(first_seen, end)) + count
            pairs += sum(min(position + 1, window) for position in range(start, end))
    tokens = sum(count for _, count in items)
    plan = step(*items)
    expected = model.weight_bytes(tokens) + 2 * 2 * 8 * 2 * read
    assert RooflineCost(model, READER).step_seconds(plan) == expected
    flops = 2 * (900 * tokens + 100 * len(items)) + 4 * 4 * 8 * pairs
    assert RooflineCost(model, COMPUTER).step_seconds(plan) == flops


def test_a_window_that_no_context_outgrows_costs_what_none_does() -> None:
    windows = replace(MODEL, windows=(64, 64))
    for items in ([(0, 64)], [(63, 1)], [(10, 20), (5, 1)]):
        plan = step(*items)
        for hardware in (MACHINE, READER, COMPUTER):
            seconds = RooflineCost(windows, hardware).step_seconds(plan)
            assert seconds == RooflineCost(MODEL, hardware).step_seconds(plan)


def test_a_copy_moves_the_layers_of_its_page() -> None:
    copies = (PageCopy(0, 0, 0, 1, 3), PageCopy(1, 0, 0, 1, 4))
    bare, copying = step((9, 1)), step((9, 1), copies=copies)
    for layers, layer_bytes in ((1, 64), (2, 128)):
        cost = RooflineCost(MODEL, READER, layers_per_page=layers)
        moved = cost.step_seconds(copying) - cost.step_seconds(bare)
        assert moved == layer_bytes * (2 * 3 + 4)
    with pytest.raises(ConfigError, match="layers_per_page must be at most 2, got 3"):
        RooflineCost(MODEL, READER, layers_per_page=3)


# -- latents


def test_latents_are_read_once() -> None:
    latent = replace(MODEL, num_kv_heads=1, head_dim=12, latent_rank=8)
    assert latent.kv_bytes_per_token == 2 * 12 * 2
    seconds = RooflineCost(latent, READER).step_seconds(step((9, 1)))
    assert seconds == 2000 + 48 * 11
    # A score of all 12 numbers, and a value of 8, of each of 4 heads in 2 layers.
    assert latent.pair_flops == 2 * 2 * 4 * (12 + 8)


# -- mixtures


@pytest.mark.parametrize(("num_experts", "per_token"), [(4, 1), (4, 2), (5, 3), (3, 3)])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
def test_as_many_experts_are_read_as_uniform_routing_chooses(
    num_experts: int, per_token: int, num_tokens: int
) -> None:
    choices = list(combinations(range(num_experts), per_token))
    routed = list(product(choices, repeat=num_tokens))
    read = sum(len(set().union(*each)) for each in routed) / len(routed)
    shape = ExpertsShape(
        num_layers=2, num_experts=num_experts, experts_per_token=per_token, expert_params=10
    )
    assert shape.num_read(num_tokens) == pytest.approx(read)
    model = replace(MODEL, experts=(shape,))
    # Without a token's own experts, there are so many weights beside.
    beside = 1000 - 2 * per_token * 10
    assert model.weight_bytes(num_tokens) == pytest.approx(2 * (beside + 2 * 10 * read), abs=1)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek3-moe"])
def test_a_mixture_computes_its_tokens_experts_and_reads_all_in_a_long_step(name: str) -> None:
    config = DecoderConfig.from_dict(CONFIGS[name])
    shape = ModelShape.of(config)
    assert shape.experts
    size = shape.bytes_per_value
    one = shape.weight_bytes(1)
    # What one token reads is what it is multiplied with, in layers and head.
    assert one == (shape.layer_params + shape.head_params) * size
    idle = sum(
        of.num_layers * (of.num_experts - of.experts_per_token) * of.expert_params
        for of in shape.experts
    )
    assert shape.weight_bytes(10**6) == one + idle * size
    reads = [shape.weight_bytes(tokens) for tokens in range(40)]
    assert reads == sorted(reads)


def test_experts_have_their_part_of_bytes_that_are_known() -> None:
    kinds = [
        ExpertsShape(num_layers=1, num_experts=4, experts_per_token=2, expert_params=params)
        for params in (10, 30)
    ]
    held = replace(MODEL, experts=tuple(kinds)).with_weight_bytes(1000, 160)
    assert [one.expert_bytes for one in held.experts] == [10, 30]
    assert held.weight_bytes(0) == 840
    assert held.weight_bytes(1) == 840 + 2 * 10 + 2 * 30
    assert held.weight_bytes(10**4) == 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": (8, 0)}, "windows must be at least 1, got 0"),
        ({"windows": (8, 8, 8)}, "windows must be a tuple of at most num_layers"),
        ({"windows": [8]}, "windows must be a tuple"),
        ({"experts": (3,)}, "experts must be of ExpertsShape, got 3"),
        (
            {
                "experts": (
                    ExpertsShape(num_layers=3, num_experts=2, experts_per_token=1, expert_params=1),
                )
            },
            "experts must have at most num_layers of 2",
        ),
        (
            {
                "experts": (
                    ExpertsShape(
                        num_layers=2, num_experts=2, experts_per_token=1, expert_params=501
                    ),
                )
            },
            "layer_params: 900 are fewer than the experts of a token have",
        ),
    ],
)
def test_a_shape_that_is_none_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(MODEL, **change)


def test_more_experts_of_a_token_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="experts_per_token must be at most 2, got 3"):
        ExpertsShape(num_layers=1, num_experts=2, experts_per_token=3, expert_params=1)
