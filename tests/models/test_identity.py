"""Digests of models depend on content only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from aioserve.models.config import DecoderConfig
from aioserve.models.files import model_files
from aioserve.models.identity import computation_digest, weights_digest
from aioserve.models.quantization.while_loading import QuantizedWhileLoading
from tests.models.quantization.compressed import write_mixture
from tests.parity.tiny_models import CONFIGS, write


def digest_of(directory: Path, quantization: str | None = None) -> bytes:
    files = model_files(directory)
    config = files.config()
    with files.weights(config) as stored:
        if quantization is None:
            return weights_digest(stored, config)
        return weights_digest(QuantizedWhileLoading(stored, config, quantization), config)


def test_every_number_counts(tmp_path: Path):
    before = digest_of(write("qwen3", tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors)[::7]:
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[-1] += 1e-3
        save_file(changed, file)
        assert digest_of(tmp_path) != before, name
    save_file(tensors, file)
    assert digest_of(tmp_path) == before


def test_formats_count(tmp_path: Path):
    model, floats = write_mixture(tmp_path)
    methods = (None, "int8", "int4", "fp8")
    found = [digest_of(model), *(digest_of(floats, method) for method in methods)]
    assert len(set(found)) == len(found)
    narrow = write("qwen3", tmp_path / "narrow", dtype="bfloat16")
    assert digest_of(narrow) != digest_of(write("qwen3", tmp_path / "wide"))


def test_shards_and_the_order_in_a_file_do_not_count(tmp_path: Path):
    before = digest_of(write("qwen3", tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    placed = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    for shard in ("a.safetensors", "b.safetensors"):
        inside = {name: tensors[name] for name in reversed(names) if placed[name] == shard}
        save_file(inside, tmp_path / shard)
    file.unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert digest_of(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 6000.0},
        {"rms_norm_eps": 1e-6},
        {"num_key_value_heads": 3},
        {"tie_word_embeddings": False},
    ],
)
def test_what_is_computed_counts(change: dict[str, object]):
    plain = DecoderConfig.from_dict(CONFIGS["llama"])
    changed = DecoderConfig.from_dict(CONFIGS["llama"] | change)
    assert computation_digest(plain, 100) != computation_digest(changed, 100)


def test_the_longest_context_counts_where_it_chooses_the_rotation():
    plain, long = (DecoderConfig.from_dict(CONFIGS[name]) for name in ("llama", "phi3-longrope"))
    assert computation_digest(plain, 64) == computation_digest(plain, 128)
    assert computation_digest(long, 64) != computation_digest(long, 128)


def test_two_processes_agree(tmp_path: Path):
    write("phi3-longrope", tmp_path)
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from aioserve.paging.format import KV_FORMATS\n"
        "from aioserve.kv.namespace import KVContent, cache_key, namespace_key\n"
        "from aioserve.models.files import model_files\n"
        "from aioserve.models.identity import computation_digest, weights_digest\n"
        "files = model_files(sys.argv[1])\n"
        "config = files.config()\n"
        "with files.weights(config) as stored:\n"
        "    weights = weights_digest(stored, config)\n"
        "content = KVContent(weights=weights, computation=computation_digest(config, 64),\n"
        "    dtype='float32', activation_quantization='int8',\n"
        "    kv_format=KV_FORMATS['float32'], page_size=16, kernels='native portable')\n"
        "key = cache_key(content, namespace_key(salt='x'), np.arange(5, dtype=np.int32))\n"
        "print(key.hex())\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "PYTHONHASHSEED": seed, "AIOSERVE_NUM_THREADS": threads},
        ).stdout
        for seed, threads in (("1", "1"), ("2", "3"))
    }
    assert len(told) == 1
    assert len(told.pop().strip()) == 64
