"""Quantised copies, read by transformers.

Needs the package compressed-tensors, and is skipped without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve.models.files import model_files
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import METHODS, method_named
from aioserve.testing.random_model import write_random_model
from tests.models.quantization.writers import CONFIG

pytest.importorskip("compressed_tensors")


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", METHODS)
def test_transformers_reads_the_same_weights(tmp_path: Path, name: str):
    from transformers import AutoModelForCausalLM

    model = write_random_model(tmp_path / "model", CONFIG, dtype="bfloat16")
    write_quantized_copy(model, tmp_path / "copy", method_named(name, None))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.bfloat16)
    with torch.inference_mode():
        assert loaded(torch.tensor([[5, 9, 200, 31]])).logits.isfinite().all()
    theirs = loaded.state_dict()  # decompressed by the first computation
    files = model_files(tmp_path / "copy")
    config = files.config()
    with files.weights(config) as stored:
        for described in config.linears:
            for tensor in described.weights:
                ours = torch.from_numpy(stored[tensor].floats()).to(torch.bfloat16)
                assert torch.equal(ours, theirs[tensor.name]), tensor.name
