"""A simulated model has the pages of an engine with that model. The same layers share a page, the
same memory holds as many, and window layers keep theirs as long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Engine, SchedulingPolicy
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.capacity.weights import read_weights
from aioserve.errors import ConfigError
from aioserve.models.config import DecoderConfig
from aioserve.paging.format import KV_FORMATS
from aioserve.paging.layout import kv_layout
from aioserve.paging.pages import pages_for
from aioserve.simulation.cost import CostTable, MeasuredKV
from aioserve.simulation.machine import Machine, machine_of
from aioserve.simulation.options import TrialOptions
from aioserve.simulation.roofline import RooflineCost
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Timeline
from aioserve.testing import replay
from aioserve.traces.trace_request import TraceRequest
from tests.parity.tiny_models import CONFIGS, write
from tests.simulation.test_against_engine import OddCost
from tests.tiers import examples

MODELS = ("llama", "mistral", "gemma2", "gemma3", "gpt-oss", "mixtral-sliding", "deepseek3-moe")
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt-oss", "mixtral-sliding")


def simulated(model: str, **options: Any) -> Machine:
    return machine_of(TrialOptions(model=model, hardware="cpu", **options))


@pytest.mark.parametrize("max_model_len", [None, 100, 10])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.asyncio
async def test_pages_are_those_of_an_engine(
    name: str, page_size: int, max_model_len: int | None, tmp_path: Path
) -> None:
    directory = str(write(name, tmp_path / name))
    sizes = {"page_size": page_size, "max_model_len": max_model_len}
    machine = simulated(directory, **sizes)
    given = {name: value for name, value in sizes.items() if value is not None}
    async with Engine(directory, device="cpu", num_pages=1000, **given) as engine:
        limits, loaded = engine.limits, engine.dump()["model"]
    windows = machine.num_window_groups, machine.window
    assert windows == (limits.num_window_groups, limits.window)
    if name in WINDOWED:
        assert bool(windows[0]) == (max_model_len != 10)
    weights = read_weights(directory)
    assert weights is not None
    beside = hardware_preset("cpu").memory_bytes - weights.on_cpu.held_bytes
    page_bytes = loaded["kv_cache_bytes"] // 1000
    assert machine.num_pages == int(beside * 0.9) // page_bytes
    # Copies move what is in a page.
    config = DecoderConfig.from_dict(CONFIGS[name])
    layers = config.kv_layers(KV_FORMATS["float32"])
    layout = kv_layout(layers, max_model_len or config.max_position_embeddings)
    assert layout.bytes_per_page(page_size) == page_bytes
    assert isinstance(machine.cost, RooflineCost)
    whole = machine.cost.model.kv_bytes_per_token // config.num_layers * layout.layers_per_page
    assert machine.cost.page_bytes_per_token == whole


def config_of(types: list[str], window: int, longest: int) -> dict[str, Any]:
    layers = {"num_hidden_layers": len(types), "layer_types": types, "sliding_window": window}
    return {**CONFIGS["gemma3"], **layers, "max_position_embeddings": longest}


@settings(deadline=None, max_examples=examples(60))
@given(
    types=st.lists(
        st.sampled_from(["sliding_attention", "full_attention"]), min_size=1, max_size=24
    ),
    window=st.integers(1, 5000),
    longest=st.sampled_from([100, 4096, 32_768]),
    max_model_len=st.sampled_from([None, 2, 90, 3000, 30_000]),
    page_size=st.sampled_from([1, 8, 16]),
)
def test_whatever_the_layers_and_the_longest_context_pages_hold_those_of_the_decoder(
    types: list[str],
    window: int,
    longest: int,
    max_model_len: int | None,
    page_size: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(config_of(types, window, longest)))
    machine = simulated(str(path), page_size=page_size, max_model_len=max_model_len)
    config = DecoderConfig.from_dict(config_of(types, window, longest))
    layout = kv_layout(config.kv_layers(KV_FORMATS["bfloat16"]), max_model_len or longest)
    assert machine.num_window_groups == layout.num_window_groups
    assert machine.window == layout.window


def test_in_the_same_memory_more_requests_run_where_layers_have_a_window(tmp_path: Path) -> None:
    types = [*["sliding_attention"] * 5, "full_attention"] * 3
    trace = [TraceRequest(number, 0.0, 4096, 400, (), 16) for number in range(12)]
    most = {}
    for window, layers_per_page in ((256, 3), (32_768, 18)):
        path = tmp_path / f"{window}.json"
        path.write_text(json.dumps(config_of(types, window, 32_768)))
        machine, timeline = simulated(str(path)), Timeline()
        num_pages = 3 * pages_for(4096 + 464, 16) * 18 // layers_per_page
        windows: dict[str, Any] = {
            "num_window_groups": machine.num_window_groups,
            "window": machine.window,
        }
        assert windows["num_window_groups"] == 18 // layers_per_page - 1
        simulate(
            trace,
            SchedulingPolicy(),
            cost=machine.cost,
            num_pages=num_pages,
            timeline=timeline,
            **windows,
        )
        most[window] = max(step.running for step in timeline.steps)
        assert max(step.pages_held for step in timeline.steps) <= num_pages
    assert most[32_768] == 3
    assert most[256] >= 10


def test_experts_take_their_part_of_the_weights_that_are_held(tmp_path: Path) -> None:
    directory = str(write("mixtral", tmp_path / "mixtral"))
    shape = ModelShape.of(read_model(directory))
    (experts,) = shape.experts
    plain, rounded = read_weights(directory), read_weights(directory, "int8")
    assert plain is not None
    assert rounded is not None
    num_params = experts.num_layers * experts.num_experts * experts.expert_params
    assert plain.on_gpu.expert_bytes == 4 * num_params
    for held in (plain.on_cpu, plain.on_gpu, rounded.on_cpu, rounded.on_gpu):
        assert held.expert_bytes < held.step_bytes
        known = shape.with_weight_bytes(held.step_bytes, held.expert_bytes)
        assert known.weight_bytes(0) == held.step_bytes - held.expert_bytes
        assert known.weight_bytes(10**6) == pytest.approx(
            held.step_bytes, abs=experts.num_experts * experts.num_layers
        )
    assert rounded.on_cpu.expert_bytes < 0.6 * plain.on_cpu.expert_bytes


def table(**kv: int) -> CostTable:
    measured = MeasuredKV(num_pages=600, page_size=16, max_model_len=4096, **kv)
    return CostTable([0, 9999], [0, 999], [[0.1, 0.1]] * 2, kv=measured)


def test_pages_of_a_cost_table_have_the_groups_that_were_measured() -> None:
    old = machine_of(TrialOptions(cost=table()))
    assert (old.num_pages, old.num_window_groups, old.window) == (600, 0, 0)
    measured = machine_of(TrialOptions(cost=table(num_window_groups=5, window=512), page_size=8))
    assert measured.num_pages == 1200
    assert (measured.num_window_groups, measured.window) == (5, 512)
    with pytest.raises(ConfigError, match="with num_window_groups=5, num_pages must be at least 6"):
        replay(
            "bursts",
            "fcfs",
            num_requests=9,
            num_pages=5,
            cost=table(num_window_groups=5, window=512),
        )


def test_sequences_of_a_measured_memory_share_what_the_windows_leave() -> None:
    kv = table().kv
    assert kv is not None
    assert kv.tokens_of(1) == kv.tokens_of(9) == 9600
    kv = table(num_window_groups=5, window=65).kv
    assert kv is not None
    # At most five window pages in each of five groups.
    assert kv.tokens_of(1) == (600 - 25) * 16
    assert kv.tokens_of(4) == (600 - 100) * 16
    assert kv.tokens_of(99) == 100 * 16


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ({"window": 5}, "window must be at least 1 with num_window_groups"),
        ({"num_window_groups": 5}, "window must be at least 1 with num_window_groups"),
        ({"num_window_groups": -1}, "num_window_groups must be at least 0, got -1"),
        ({"num_window_groups": 0.5, "window": 9}, "num_window_groups must be an int, got 0.5"),
        ({"num_window_groups": 1025, "window": 9}, "num_window_groups must be at most 1024"),
        ({"num_window_groups": 9, "window": 9}, "num_pages must be at least 10, got 9"),
        (
            {"num_window_groups": 1000, "window": 9, "num_pages": 1 << 20},
            "with num_window_groups=1000, num_pages must be at most 134217",
        ),
        (
            {"num_window_groups": 5, "window": 9, "num_host_pages": 1 << 25},
            "num_host_pages must be at most 26843545",
        ),
        (
            {"num_window_groups": 1000, "window": 9, "num_pages": None, "page_size": 1},
            "could need 131131 pages of 1 token, and at most 131072 can be simulated",
        ),
    ],
)
def test_windows_that_are_none_are_refused(windows: dict[str, Any], message: str) -> None:
    trace = [TraceRequest(0, 0.0, 100, 30, (), 16)]
    with pytest.raises(ConfigError, match=message):
        simulate(trace, SchedulingPolicy(), cost=OddCost(), **{"num_pages": 9, **windows})


@pytest.mark.parametrize(
    ("max_model_len", "message"),
    [
        (0, "max_model_len must be at least 2, got 0"),
        ("16", "max_model_len must be an int, got '16'"),
        (1 << 70, "max_model_len must be at most"),
    ],
)
def test_a_longest_context_that_is_none_is_refused_by_name(
    max_model_len: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of(["sliding_attention", "full_attention"], 64, 4096)))
    with pytest.raises(ConfigError, match=f"^{message}"):
        replay([], "fcfs", model=str(path), max_model_len=max_model_len)


def test_without_a_limit_pages_are_enough_for_all_groups() -> None:
    trace = [TraceRequest(number, 0.0, 100, 20, (), 16) for number in range(9)]
    options: dict[str, Any] = {"cost": OddCost(), "num_pages": None}
    few = simulate(trace, SchedulingPolicy(), **options)
    many = simulate(trace, SchedulingPolicy(), num_window_groups=3, window=40, **options)
    assert many.num_pages == 4 * few.num_pages
    assert many.preemptions == 0
