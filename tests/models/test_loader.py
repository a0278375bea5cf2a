"""Loading of weights: dtypes, progress, tied heads, and every kind of wrong file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioserve.errors import ConfigError, ModelNotFoundError, WeightsError
from aioserve.models import weight_memory
from aioserve.models.loader import load_model
from aioserve.ops.reference import ReferenceBackend
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import CONFIGS, VOCAB_SIZE, write

PROMPT = list(range(20))
Tensors = dict[str, torch.Tensor]


def logits_of(directory: Path, **options) -> torch.Tensor:
    return PagedRun(load_model(directory, **options)).step({"a": PROMPT})["a"]


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a directory's single weight file."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def split(directory: Path) -> dict[str, str]:
    """Turn the single file into two shards and an index; return the index's map."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, directory / shard)
        weight_map.update(dict.fromkeys(part, shard))
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def error_of(directory: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        load_model(directory)
    return str(caught.value)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return write("qwen3", tmp_path)


@pytest.fixture
def phi3(tmp_path: Path) -> Path:
    return write("phi3", tmp_path)


def test_progress_counts_up_to_the_bytes_of_the_tensors(phi3):
    calls: list[tuple[int, int]] = []

    load_model(phi3, progress=lambda done, total: calls.append((done, total)))

    expected = sum(tensor.nbytes for tensor in load_file(phi3 / "model.safetensors").values())
    assert {total for _, total in calls} == {expected}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == expected


@pytest.mark.parametrize(
    ("stored", "chosen"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float32)],
)
def test_the_dtype_is_the_checkpoints_and_float16_becomes_float32(tmp_path, stored, chosen):
    write("qwen3", tmp_path, dtype=stored)
    assert load_model(tmp_path).dtype is chosen

    config = {k: v for k, v in CONFIGS["qwen3"].items() if k != "dtype"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path).dtype is chosen


def test_a_backend_that_computes_in_float16_keeps_it(tmp_path):
    write("qwen3", tmp_path, dtype="float16")
    decoder = load_model(tmp_path, backend=ReferenceBackend())
    assert decoder.dtype is torch.float16
    logits = PagedRun(decoder).step({"a": list(range(5))})["a"]
    widened = load_model(tmp_path, dtype="float32", backend=ReferenceBackend())
    expected = PagedRun(widened).step({"a": list(range(5))})["a"]
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)
    assert not torch.equal(logits, expected)


def test_a_dtype_can_be_chosen_by_name_or_value(qwen3):
    assert load_model(qwen3, dtype="bfloat16").dtype is torch.bfloat16
    assert load_model(qwen3, dtype=torch.bfloat16).new_cache(1, 4).dtype is torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype must be auto, .*float16, got int8"):
        load_model(qwen3, dtype="int8")


@pytest.mark.parametrize("dtype", ["float16", torch.float16], ids=str)
def test_float16_is_refused_where_it_is_not_computed(qwen3, dtype):
    with pytest.raises(ConfigError, match=r"dtype=float16 isn't computed by the native ops"):
        load_model(qwen3, dtype=dtype)


def test_the_context_is_limited_to_the_models(qwen3):
    assert load_model(qwen3).max_model_len == 256
    for length in (0, 257):
        with pytest.raises(ConfigError, match=rf"max_model_len must be in \[1, 256\].*{length}"):
            load_model(qwen3, max_model_len=length)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_positions_past_the_limit_are_refused(tmp_path, name):
    run = PagedRun(load_model(write(name, tmp_path), max_model_len=16))
    with pytest.raises(ValueError, match="at most 16, got 17"):
        run.step({"a": PROMPT[:17]})


def test_shards_load_as_one_file_does(phi3):
    expected = logits_of(phi3)
    split(phi3)

    assert torch.equal(logits_of(phi3), expected)


def test_weights_survive_the_removal_of_their_file(phi3):
    decoder = load_model(phi3)
    expected = PagedRun(decoder).step({"a": PROMPT})["a"]

    with (phi3 / "model.safetensors").open("r+b") as file:
        file.truncate(0)

    assert torch.equal(PagedRun(decoder).step({"a": PROMPT})["a"], expected)


def test_a_tied_head_may_be_stored_again(qwen3):
    expected = logits_of(qwen3)
    embedding = "model.embed_tokens.weight"
    rewrite(qwen3, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert torch.equal(logits_of(qwen3), expected)

    # A stored head that differs is used, in spite of config.json.
    rewrite(qwen3, lambda t: t.update({"lm_head.weight": 2 * t[embedding]}))
    torch.testing.assert_close(logits_of(qwen3), 2 * expected)


def test_a_large_tied_embedding_is_kept_once_and_computes_the_same(qwen3, monkeypatch):
    kept_twice = logits_of(qwen3)
    monkeypatch.setattr(weight_memory, "TWO_COPIES_BYTES", 0)
    model = load_model(qwen3)
    assert model._weights.embedding is model._weights.head
    assert torch.equal(PagedRun(model).step({"a": PROMPT})["a"], kept_twice)


def test_buffers_of_old_checkpoints_are_ignored(tmp_path):
    qwen3, gpt2 = write("qwen3", tmp_path / "qwen3"), write("gpt2", tmp_path / "gpt2")
    rewrite(
        qwen3,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    rewrite(gpt2, lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}))

    load_model(qwen3)
    load_model(gpt2)


def test_gpt2_names_without_the_common_prefix_are_found(tmp_path):
    expected = logits_of(write("gpt2", tmp_path))

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    rewrite(tmp_path, strip)

    assert torch.equal(logits_of(tmp_path), expected)


def test_no_directory(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"nowhere: no such directory"):
        load_model(tmp_path / "nowhere")


def test_no_weights(qwen3):
    (qwen3 / "model.safetensors").unlink()
    assert f"no .safetensors in {qwen3}" in error_of(qwen3)

    (qwen3 / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle and isn't loaded: convert it" in error_of(qwen3)

    (qwen3 / "adapter.safetensors").touch()
    assert "found only adapter.safetensors" in error_of(qwen3)


def test_a_missing_shard_is_named_with_a_tensor_of_it(qwen3):
    weight_map = split(qwen3)
    (qwen3 / "b.safetensors").unlink()

    message = error_of(qwen3)

    assert str(qwen3 / "b.safetensors") in message
    assert min(name for name, shard in weight_map.items() if shard == "b.safetensors") in message


def test_an_index_that_places_a_tensor_in_the_wrong_shard(qwen3):
    weight_map = split(qwen3)
    weight_map["model.norm.weight"] = (
        "a.safetensors" if weight_map["model.norm.weight"] == "b.safetensors" else "b.safetensors"
    )
    write_index(qwen3, weight_map)

    message = error_of(qwen3)

    assert str(qwen3 / weight_map["model.norm.weight"]) in message
    assert "model.norm.weight" in message


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 7])
def test_an_index_that_points_out_of_the_directory(qwen3, shard):
    weight_map = {**split(qwen3), "model.norm.weight": shard}
    write_index(qwen3, weight_map)

    message = error_of(qwen3)

    assert "model.safetensors.index.json: weight_map.model.norm.weight" in message
    assert repr(shard) in message


def test_an_index_without_a_map(qwen3):
    (qwen3 / "model.safetensors").unlink()
    write_index(qwen3, [])
    assert "weight_map must be an object" in error_of(qwen3)


def test_a_missing_tensor_is_named(qwen3):
    rewrite(qwen3, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight" in error_of(qwen3)
    assert str(qwen3) in error_of(qwen3)


def test_a_missing_head_of_untied_embeddings_is_named(phi3):
    rewrite(phi3, lambda t: t.pop("lm_head.weight"))
    assert "lack lm_head.weight" in error_of(phi3)


def test_many_missing_tensors_are_counted(qwen3):
    rewrite(qwen3, lambda t: [t.pop(name) for name in list(t) if ".mlp." in name])
    assert "model.layers.0.mlp.down_proj.weight" in error_of(qwen3)
    assert "and 5 more tensors" in error_of(qwen3)


def test_a_wrong_shape_is_named_with_both_shapes(qwen3):
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(qwen3, lambda t: t.update({name: torch.ones(16, 48)}))

    message = error_of(qwen3)

    assert str(qwen3 / "model.safetensors") in message
    assert f"{name} has shape [16, 48], config.json asks for [32, 48]" in message


def test_a_wrong_dtype_is_named(qwen3):
    name = "model.norm.weight"
    rewrite(qwen3, lambda t: t.update({name: torch.ones(48, dtype=torch.int32)}))
    assert f"{name} has dtype I32, only F32, BF16, F16 can be loaded" in error_of(qwen3)


def test_a_tensor_without_a_place_in_the_architecture_is_named(qwen3):
    """Files may have biases that config.json lacks. Without them, logits would be wrong."""
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(qwen3, lambda t: t.update({name: torch.ones(96)}))
    assert f"has no place for {name} in model.safetensors" in error_of(qwen3)


def test_a_tensor_under_two_names_is_named(tmp_path):
    write("gpt2", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"ln_f.bias": torch.ones(48)}))
    assert "ln_f.bias" in error_of(tmp_path)
    assert "also in" in error_of(tmp_path)


@pytest.mark.parametrize("keep_bytes", [0, 5, 400, -1])
def test_a_truncated_file_is_named(qwen3, keep_bytes):
    file = qwen3 / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep_bytes])

    assert f"{file}: not a complete safetensors file" in error_of(qwen3)


def test_a_git_lfs_pointer_is_recognised(qwen3):
    file = qwen3 / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")

    assert f"{file}: is a Git LFS pointer" in error_of(qwen3)


def test_every_tiny_model_loads_with_finite_varied_logits(tmp_path):
    for name in CONFIGS:
        logits = logits_of(write(name, tmp_path / name, dtype="bfloat16"))
        assert logits.isfinite().all(), name
        assert logits.shape == (len(PROMPT), VOCAB_SIZE), name
        assert len(set(logits.argmax(-1).tolist())) > 5, name
