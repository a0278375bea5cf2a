"""Unusable scales and numbers are refused, with the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioserve.errors import WeightsError
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.conversion import convert
from tests.models.gguf.writing import BY_NAME
from tests.models.quantization.blockwise import load_in, storing_eight_bits, storing_four_bits
from tests.models.quantization.compressed import config_of, storing, storing_blocks, weights_of
from tests.models.quantization.writers import CONFIG, write_quantized

BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
WRITTEN: dict[str, tuple[dict[str, Any], Callable[..., Any], str]] = {
    "integers": (
        config_of("int-quantized", weights_of(8)),
        storing(8, -1, packed=False),
        "weight_scale",
    ),
    "groups": (
        config_of("pack-quantized", weights_of(4, 32)),
        storing(4, 32, packed=True),
        "weight_scale",
    ),
    "fp8": (BLOCKS, storing_blocks((32, 32), "weight_scale_inv"), "weight_scale_inv"),
    "rows": (load_in(8), storing_eight_bits, "SCB"),
    "nf4": (load_in(4), storing_four_bits("nf4", 64), "weight.absmax"),
    "double": (load_in(4), storing_four_bits("nf4", 64, double=256), "weight.nested_absmax"),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("damage", [float("nan"), float("inf"), -float("inf"), 1e30, 3e38])
@pytest.mark.parametrize("kind", WRITTEN)
def test_a_damaged_scale_is_named(tmp_path: Path, kind: str, damage: float, backend: str):
    said, store, part = WRITTEN[kind]
    model, _ = write_quantized(tmp_path, said, store)
    file = model / "model.safetensors"
    tensors = load_file(file)
    scales = tensors[f"model.layers.1.mlp.up_proj.{part}"]
    scales.view(-1)[-1] = damage  # in the last row; 1e30 is infinite in float16
    save_file(tensors, file)
    with pytest.raises(WeightsError) as refusal:
        load_model(model, backend=backend_named(backend))
    named = str(refusal.value)
    assert named.startswith(f"{file}: model.layers.1.mlp.up_proj.")
    assert re.search(
        r"row \d+ of the weight has the (scale|number) \S+, must be within 7\.2", named
    )
    if kind in ("integers", "groups", "rows", "nf4"):  # in other kinds, rows share scales
        assert "row 95 " in named


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    ("name", "field", "content", "what"),
    [
        ("Q8_0", "d", b"\x00\x7e", "scale nan"),
        ("Q4_K", "d", b"\x00\x7c", "scale inf"),
        ("Q4_K", "dmin", b"\x00\xfc", "minimum "),
        ("Q6_K", "d", b"\x00\x7e", "scale nan"),
        ("MXFP4", "e", b"\xff", "scale 1.7"),
    ],
)
def test_a_damaged_block_of_a_gguf_file_is_named(
    tmp_path: Path, name: str, field: str, content: bytes, what: str, backend: str
):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    directory = write_random_model(tmp_path / "hf", CONFIG | sizes, dtype="float32")
    path = convert(directory, tmp_path / "x.gguf", weights=name)
    files, form = model_files(path), BY_NAME[name]
    config = files.config()
    with files.weights(config) as stored:
        tensor = next(
            weight
            for described in config.linears
            for weight in described.weights
            if weight.name == "model.layers.1.mlp.down_proj.weight"
        )
        part = stored[tensor].parts["weight"]
    row = 3 * form.bytes_per_row(512)
    fields = form.block.fields or {}
    place = next(where[1] for key, where in fields.items() if key == field)
    with path.open("r+b") as file:
        file.seek(part.offset + row + place)
        file.write(content)
    with pytest.raises(WeightsError) as refusal:
        load_model(path, backend=backend_named(backend))
    assert f"{path}: blk.1.ffn_down.weight: row 3 of the weight has the {what}" in str(
        refusal.value
    )


def test_a_number_of_eight_bits_that_is_none_is_named(tmp_path: Path):
    said, store, _ = WRITTEN["fp8"]
    model, _ = write_quantized(tmp_path, said, store)
    tensors = load_file(model / "model.safetensors")
    weight = tensors["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)
    weight[7, 3] = 0x7F
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(
        WeightsError, match=r"down_proj\..*: row 7 of the weight has the number nan"
    ):
        load_model(model)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_damaged_scale_of_zeros_is_named_too(tmp_path: Path, backend: str):
    """It changes no weight, but a kernel's product with it may overflow a float."""
    said, store, part = WRITTEN["fp8"]
    model, _ = write_quantized(tmp_path, said, store)
    file = model / "model.safetensors"
    tensors = load_file(file)
    module = "model.layers.1.mlp.up_proj"
    tensors[f"{module}.weight"].view(torch.uint8)[:32, :32] = 0
    tensors[f"{module}.{part}"][0, 0] = 2.0**121
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"row 0 of the weight has the scale 2\.65\S+, must be"):
        load_model(model, backend=backend_named(backend))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_damaged_table_is_named(tmp_path: Path, damage: float, backend: str):
    said, store, _ = WRITTEN["nf4"]
    model, _ = write_quantized(tmp_path, said, store)
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight.quant_map"][3] = damage
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"up_proj.*quant_map must hold finite numbers"):
        load_model(model, backend=backend_named(backend))
