"""The memory calculator says what is known of well-known models, and its sums add up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.capacity.capacity import (
    GIB,
    PRECISIONS,
    Capacity,
    capacity_of,
    kv_bytes_per_token,
    weight_bytes,
)
from aioserve.capacity.models import PRESETS, read_model
from aioserve.capacity.sizes import ModelSizes, ParameterCount, count_parameters
from aioserve.errors import ConfigError
from aioserve.models.config import DecoderConfig
from aioserve.ops import KVShape
from aioserve.ops.native import NativeBackend
from aioserve.paging.format import COUNTED_KV_FORMATS, KV_FORMATS, KVFormat, KVPlane
from aioserve.paging.layout import kv_layout

MODELS = {name: read_model(name) for name in PRESETS}


def sized(model: str, **options: Any) -> Capacity:
    return capacity_of(model, MODELS[model], **options)


@pytest.mark.parametrize(
    ("model", "at_4k", "at_128k"),
    [("llama-3-8b", 0.50, 16), ("llama-3-70b", 1.25, 40), ("llama-3-405b", 1.97, 63)],
)
def test_kv_per_request_is_that_of_the_known_table(
    model: str, at_4k: float, at_128k: float
) -> None:
    rows = {row.context_tokens: row for row in sized(model).contexts}
    assert round(rows[4096].kv_bytes_per_request / GIB, 2) == at_4k
    assert rows[131_072].kv_bytes_per_request == at_128k * GIB


def test_quantised_weights_keep_embeddings_head_and_norms_in_16_bits() -> None:
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    others = 2 * 128_256 * 4096 + (2 * 32 + 1) * 4096
    taken = {dtype: sized("llama-3-8b", dtype=dtype).weight_bytes for dtype in PRECISIONS}
    assert taken["float32"] == 4 * (layers + others)
    assert taken["bfloat16"] == taken["float16"] == 2 * (layers + others)
    assert taken["fp8"] == taken["int8"] == layers + 2 * others
    assert taken["int4"] == layers // 2 + layers // 128 * 20 // 8 + 2 * others


def test_int4_weights_are_counted_with_their_scales() -> None:
    assert weight_bytes(ParameterCount(0, 256, 0), "int4") == 256 // 2 + 2 * 20 // 8
    assert weight_bytes(ParameterCount(10, 0, 0), "int4") == 20
    assert weight_bytes(ParameterCount(0, 0, 10), "int4") == 20


def test_kv_of_8_bits_takes_half() -> None:
    whole, half = sized("llama-3-8b"), sized("llama-3-8b", kv_dtype="fp8")
    assert (whole.kv_bytes_per_token, half.kv_bytes_per_token) == (131_072, 65_536)
    assert half.num_pages == pytest.approx(2 * whole.num_pages, abs=1)


def test_of_layers_that_all_have_a_window_an_eighth_count_in_full() -> None:
    sliding = DecoderConfig.from_dict(PRESETS["mistral-7b"] | {"sliding_window": 4096})
    assert all(layer.mixer.window for layer in sliding.layers)
    windows, whole = capacity_of("mistral-7b", sliding), sized("mistral-7b")
    assert 8 * windows.page_bytes_per_gpu == whole.page_bytes_per_gpu
    assert windows.contexts[-1].context_tokens == 32_768
    assert windows.contexts[-1].pages_per_request == 2048 + 7 * 257


def test_auto_is_what_the_config_says() -> None:
    config = MODELS["llama-3-8b"]
    chosen = sized("llama-3-8b", dtype="auto")
    assert (chosen.dtype, chosen.kv_dtype) == ("bfloat16", "bfloat16")
    assert sized("llama-3-8b", dtype="float32").kv_dtype == "float32"
    for quantised in ("fp8", "int8", "int4"):
        assert sized("llama-3-8b", dtype=quantised).kv_dtype == "bfloat16"
    unsaid = DecoderConfig.from_dict(
        {key: value for key, value in PRESETS["llama-3-8b"].items() if key != "torch_dtype"}
    )
    assert (config.dtype, unsaid.dtype) == ("bfloat16", None)
    assert capacity_of("m", unsaid).dtype == "bfloat16"


def test_gpus_share_matrices_and_kv_heads_and_repeat_norms() -> None:
    count = count_parameters(MODELS["llama-3-70b"])
    one, four = sized("llama-3-70b"), sized("llama-3-70b", num_gpus=4)
    assert 4 * four.kv_bytes_per_token_per_gpu == four.kv_bytes_per_token == one.kv_bytes_per_token
    shared = 2 * (count.matrices + count.embeddings)
    assert four.weight_bytes_per_gpu == shared // 4 + 2 * count.vectors
    assert (one.weights_fit, four.weights_fit) == (False, True)
    assert one.num_pages == 0
    assert four.contexts[0].concurrent_requests > 0


def test_how_many_gpus_would_do_is_told() -> None:
    assert sized("llama-3-8b").fewest_gpus == 1
    assert sized("llama-3-70b").fewest_gpus == 4
    assert sized("llama-3-70b", contexts=[4096]).fewest_gpus == 2
    assert sized("llama-3-405b").fewest_gpus is None
    assert sized("llama-3-405b", dtype="fp8").fewest_gpus == 8


def test_a_request_takes_whole_pages() -> None:
    found = sized("llama-3-8b", contexts=[17, 1], page_size=16)
    assert [row.context_tokens for row in found.contexts] == [1, 17]
    assert [row.pages_per_request for row in found.contexts] == [1, 2]
    assert found.contexts[1].kv_bytes_per_request == 32 * found.kv_bytes_per_token


def test_contexts_end_where_the_models_does() -> None:
    def lengths(model: str) -> list[int]:
        return [row.context_tokens for row in sized(model).contexts]

    assert lengths("llama-3-8b") == [4096, 32_768, 131_072]
    assert lengths("qwen3-8b") == [4096, 32_768, 40_960]
    assert lengths("mistral-7b") == [4096, 32_768]


@given(
    model=st.sampled_from(sorted(MODELS)),
    dtype=st.sampled_from(PRECISIONS),
    kv_dtype=st.sampled_from(list(COUNTED_KV_FORMATS)),
    memory=st.integers(1, 2000 * GIB),
    num_gpus=st.sampled_from([1, 2, 4, 8]),
    utilization=st.floats(0, 1, exclude_min=True),
    page_size=st.sampled_from([1, 16, 128]),
    context=st.integers(1, 32_768),
)
def test_what_is_said_to_fit_fits_and_no_request_more(
    model: str,
    dtype: str,
    kv_dtype: str,
    memory: int,
    num_gpus: int,
    utilization: float,
    page_size: int,
    context: int,
) -> None:
    found = sized(
        model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        gpu_memory_bytes=memory,
        num_gpus=num_gpus,
        memory_utilization=utilization,
        page_size=page_size,
        contexts=[context],
    )
    room = max(0, memory - found.weight_bytes_per_gpu) * utilization
    assert found.num_pages * found.page_bytes_per_gpu <= room
    assert (found.num_pages + 1) * found.page_bytes_per_gpu > room - 1
    assert found.capacity_tokens == found.num_pages * page_size
    (row,) = found.contexts
    assert row.pages_per_request * page_size >= context > (row.pages_per_request - 1) * page_size
    assert row.kv_bytes_per_request == (
        row.pages_per_request * found.page_bytes_per_gpu * found.num_gpus
    )
    assert row.concurrent_requests * row.pages_per_request <= found.num_pages
    assert (row.concurrent_requests + 1) * row.pages_per_request > found.num_pages
    if row.concurrent_requests:
        assert found.weights_fit
        assert found.fewest_gpus is not None
        assert found.fewest_gpus <= num_gpus


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, r"dtype must be one of .*int4, got 'int3'"),
        ({"kv_dtype": "int4"}, r"kv_dtype must be one of .*fp8, int8, got 'int4'"),
        ({"contexts": [0]}, r"context must be in \[1, 131072\] for llama-3-8b, got 0"),
        ({"contexts": [4096, 131_073]}, r"context must be in \[1, 131072\] .*got 131073"),
        ({"gpu_memory_bytes": 0}, "gpu_memory_bytes must be at least 1, got 0"),
        ({"memory_utilization": 0.0}, r"memory_utilization must be .*at most 1, got 0\.0"),
        ({"memory_utilization": 1.5}, r"memory_utilization must be .*at most 1, got 1\.5"),
        ({"memory_utilization": float("nan")}, "memory_utilization must be .*got nan"),
        ({"page_size": 24}, "page_size must be one of .*128, got 24"),
        ({"num_gpus": 0}, r"num_gpus must divide the model's 8 KV heads \(1, 2, 4, 8\), got 0"),
        ({"num_gpus": -8}, "num_gpus must divide .*got -8"),
        ({"num_gpus": 3}, "num_gpus must divide .*got 3: .*replication"),
        ({"num_gpus": 16}, "num_gpus must divide .*got 16: .*replication"),
    ],
)
def test_what_makes_no_sense_is_refused_by_argument_value_and_limit(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sized("llama-3-8b", **options)


def test_the_parts_of_the_sum_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ConfigError, match="dtype must be one of"):
        weight_bytes(ParameterCount(1, 1, 1), "auto")
    with pytest.raises(ConfigError, match="num_gpus must be at least 1, got 0"):
        weight_bytes(ParameterCount(1, 1, 1), "int8", 0)
    with pytest.raises(ConfigError, match="kv_dtype must be one of"):
        kv_bytes_per_token(ModelSizes.of(MODELS["llama-3-8b"]), "auto")


GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "vocab_size": 300,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "query_pre_attn_scalar": 24,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("change", [{}, {"num_key_value_heads": 2}, {"num_hidden_layers": 20}])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_bytes_of_hybrids_are_the_allocators(change: dict[str, int], page_size: int) -> None:
    """The bytes match the pages that an engine's decoder lays out and the native backend
    allocates."""
    config = DecoderConfig.from_dict(GEMMA_3 | change)
    found = capacity_of("m", config, page_size=page_size, gpu_memory_bytes=1 << 24)
    assert found.num_window_groups == (5 if config.num_layers == 18 else 6)
    layers = config.kv_layers(KV_FORMATS["bfloat16"])
    own = kv_layout(layers, config.max_position_embeddings)
    cache = NativeBackend().allocate_kv(KVShape(own, found.num_pages, page_size))
    assert cache.storage.nbytes == found.page_bytes_per_gpu * found.num_pages
    room = (found.gpu_memory_bytes - found.weight_bytes) * found.memory_utilization
    assert room - found.page_bytes_per_gpu < cache.storage.nbytes <= room


def test_a_window_is_counted_once_and_not_for_the_whole_context() -> None:
    config = DecoderConfig.from_dict(GEMMA_3)
    unwindowed = DecoderConfig.from_dict(GEMMA_3 | {"sliding_window": 32_768})
    whole = capacity_of("m", unwindowed, contexts=[300, 8192])
    windows = capacity_of("m", config, contexts=[300, 8192])
    assert windows.kv_bytes_per_token == whole.kv_bytes_per_token
    assert 6 * windows.page_bytes_per_gpu == whole.page_bytes_per_gpu
    short, long = windows.contexts
    assert short.kv_bytes_per_request == whole.contexts[0].kv_bytes_per_request
    assert long.pages_per_request == 512 + 5 * 33
    assert long.kv_bytes_per_request < 0.3 * whole.contexts[1].kv_bytes_per_request
    assert windows.capacity_tokens > 5 * whole.capacity_tokens
    assert long.concurrent_requests == windows.num_pages // long.pages_per_request


def test_a_format_with_scales_is_counted_by_one_entry_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight bits, and a scale of 16 bits for each head of 128 dimensions."""
    planes = KVPlane("values", "int8", 1), KVPlane("scales", "float16", 2, dims_per_item=0)
    monkeypatch.setitem(COUNTED_KV_FORMATS, "scaled", KVFormat("scaled", planes))
    whole, scaled = sized("llama-3-8b"), sized("llama-3-8b", kv_dtype="scaled")
    assert scaled.kv_dtype == "scaled"
    assert scaled.kv_bytes_per_token == 32 * 2 * 8 * (128 + 2)
    assert scaled.page_bytes_per_gpu == 16 * scaled.kv_bytes_per_token
    assert scaled.num_pages > 1.9 * whole.num_pages
