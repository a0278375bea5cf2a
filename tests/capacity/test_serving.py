"""Speed, price, transfers and numbers of KV heads, as `aioserve plan` shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.capacity.capacity import Capacity, capacity_of
from aioserve.capacity.hardware import PRESETS as HARDWARE
from aioserve.capacity.models import ModelShape, read_model, read_sizes
from aioserve.capacity.prices import read_prices
from aioserve.capacity.serving import (
    decode_seconds,
    heads_rows,
    serving_rows,
    shape_in,
    transfer_rows,
)
from aioserve.errors import ConfigError
from aioserve.simulation.roofline import RooflineCost
from aioserve.steps.plan import ItemKind, SampleRow, StepPlan, WorkItem

MODELS = ("llama-3-8b", "mixtral-8x7b", "gpt-2", "deepseek-v3")


def planned(model: str, *contexts: int, num_gpus: int = 1) -> Capacity:
    return capacity_of(
        model, read_sizes(model), contexts=contexts, num_gpus=num_gpus, gpu_memory_bytes=141 * 10**9
    )


@pytest.mark.parametrize(
    ("model", "parameters", "active", "kv_values"),
    [
        # Counted from the configs, so that a change shows. test_models.py has published totals.
        ("gpt-2", 124_439_808, 124_439_808, 2 * 12 * 768),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248, 2 * 32 * 8 * 128),
        ("deepseek-v3", 671_026_419_200, 37_552_297_472, 61 * 576),
    ],
)
def test_the_sizes_of_presets_stay(
    model: str, parameters: int, active: int, kv_values: int
) -> None:
    sizes = read_sizes(model)
    assert sizes.parameters.total == parameters
    assert sizes.num_active_parameters == active
    assert sizes.kv_values_per_token == kv_values


@given(
    model=st.sampled_from(MODELS),
    hardware=st.sampled_from(sorted(HARDWARE)),
    batch=st.integers(1, 64),
    context=st.integers(2, 1024),
)
def test_a_decode_step_takes_as_long_as_in_a_simulation(
    model: str, hardware: str, batch: int, context: int
) -> None:
    shape, device = ModelShape.of(read_model(model)), HARDWARE[hardware]
    items = [
        WorkItem(
            ItemKind.DECODE,
            slot,
            slot,
            context - 1,
            context - 1,
            1,
            np.array([5], np.int32),
            (SampleRow(offset=0, slot=slot),),
        )
        for slot in range(batch)
    ]
    cost = RooflineCost(shape, device).step_seconds(StepPlan(step=1, items=tuple(items)))
    assert decode_seconds(shape, device, batch, context) == pytest.approx(cost)


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-2"])
def test_prices_add_up_to_the_price_of_the_gpus(model: str, num_gpus: int) -> None:
    found, shape = planned(model, 512, 1024, num_gpus=num_gpus), ModelShape.of(read_model(model))
    for row in serving_rows(found, shape, HARDWARE["h200"], 3.0):
        assert row.price_per_slot_hour is not None
        assert row.tokens_per_second is not None
        assert row.price_per_million_tokens is not None
        assert row.price_per_slot_hour * row.batch == pytest.approx(3.0 * num_gpus)
        millions = row.tokens_per_second * 3600 / 1e6
        assert row.price_per_million_tokens * millions == pytest.approx(3.0 * num_gpus)


def test_a_context_that_fits_no_request_has_no_price() -> None:
    shape = ModelShape.of(read_model("llama-3-405b"))
    (row,) = serving_rows(planned("llama-3-405b", 4096), shape, HARDWARE["h200"], 3.0)
    assert row.batch == 0
    assert row.tokens_per_second is row.price_per_slot_hour is row.price_per_million_tokens is None


def test_fewer_bits_are_read_faster() -> None:
    sizes = read_sizes("mixtral-8x7b")
    shape = ModelShape.of(read_model("mixtral-8x7b"))
    whole, half, eighth = (
        shape_in(shape, sizes.parameters, dtype, "bfloat16").weight_bytes(10_000)
        for dtype in ("bfloat16", "fp8", "int4")
    )
    assert whole == pytest.approx(shape.weight_bytes(10_000))
    assert half / whole == pytest.approx(0.5, rel=0.01)
    assert eighth / whole == pytest.approx((4 + 20 / 128) / 16, rel=0.02)


def test_one_head_has_its_share_of_the_memory_of_all() -> None:
    many, own, one = heads_rows(planned("llama-3-8b", 4096), read_sizes("llama-3-8b"))
    assert [(row.kind, row.num_kv_heads, row.is_own) for row in (many, own, one)] == [
        ("MHA", 32, False),
        ("GQA", 8, True),
        ("MQA", 1, False),
    ]
    assert many.kv_bytes_per_token == 4 * own.kv_bytes_per_token == 32 * one.kv_bytes_per_token
    assert many.concurrent_requests < own.concurrent_requests < one.concurrent_requests
    assert heads_rows(planned("deepseek-v3", 4096), read_sizes("deepseek-v3")) == []
    (gpt, single) = heads_rows(planned("gpt-2", 512), read_sizes("gpt-2"))
    assert (gpt.kind, gpt.is_own, single.kind) == ("MHA", True, "MQA")


def test_kv_takes_its_bytes_over_the_speed_of_a_link() -> None:
    rows = {row.link: row for row in transfer_rows(planned("llama-3-8b", 32_768))}
    assert rows["InfiniBand NDR"].seconds == pytest.approx((4 << 30) / 50e9)
    assert rows["NVLink 4 (H100)"].seconds < rows["PCIe 5.0 x16"].seconds
    assert rows["PCIe 5.0 x16"].seconds == pytest.approx(rows["PCIe 4.0 x16"].seconds / 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "missing required field"),
        ("as_of = 1", "as_of"),
        ('as_of = "x"\ncurrency = "EUR"\n[per_hour]\ntoaster = 1', "toaster"),
        ('as_of = "x"\ncurrency = "EUR"\n[per_hour]\nh100 = -1', "h100"),
        ('as_of = "x"\ncurrency = "EUR"\nper_hour = {}\nper_day = 1', "per_day"),
        ("as_of = ", "can't be read"),
        ("as_of = " + 5000 * "[" + 5000 * "]", "nested too deeply"),
    ],
)
def test_a_file_that_has_no_prices_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_prices(str(path))
