"""Whole models with quantised experts on the GPU: GPT-OSS in MXFP4, and other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve.models.architecture import Experts, parts_of
from aioserve.models.loader import load_model
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import method_named
from aioserve.ops import Backend
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.ops.gpu.grouped_linear import GroupedLinear, GroupedRun
from tests.models.gguf.conversion import convert
from tests.models.gguf.test_model import WIDE, written
from tests.models.quantization import test_mxfp4_experts
from tests.models.quantization.test_experts import FORMATS, MIXTURE
from tests.models.quantization.writers import write_quantized
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.scenarios import REFERENCE
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import write

round_bfloat16_to_nearest()

PROMPT = [5, 9, 200, 31, 77, 8, 120, 3, 150]


@pytest.fixture(scope="module")
def backend(device: torch.device) -> CudaBackend:
    return CudaBackend(device)


def run_of(
    model: Path, backend: Backend, quantization: str | None = None, dtype: str = "float32"
) -> PagedRun:
    return PagedRun(load_model(model, dtype=dtype, backend=backend, quantization=quantization))


def logits_of(
    model: Path, backend: Backend, quantization: str | None = None, dtype: str = "float32"
) -> torch.Tensor:
    return run_of(model, backend, quantization, dtype).step({"a": PROMPT})["a"].cpu()


def expert_runs(run: PagedRun) -> list[GroupedRun]:
    """Return the runs of all experts, which must be of small numbers."""
    decoder, found = run.decoder, []
    for experts in parts_of(decoder.config.layers, Experts):
        for one in experts.experts:
            for described in (one.up, one.down):
                layer = decoder.linears[described]
                assert isinstance(layer, GroupedLinear)
                for each in layer.runs:
                    assert isinstance(each, GroupedRun)
                    found.append(each)
    assert found
    return found


@pytest.mark.more
def test_gpt_oss_has_its_experts_in_four_bits_and_the_logits_of_their_floats(
    backend: CudaBackend, tmp_path: Path
) -> None:
    """Prompts are in chunks, with another sequence, and longer than the window."""
    model, floats = test_mxfp4_experts.write(tmp_path)
    run = run_of(model, backend)
    for each in expert_runs(run):
        values = each.out_features * each.sizes.in_features
        assert each.numbers.bias is not None
        # Every 32 numbers share a scale of 2 bytes.
        assert each.num_bytes == values / 2 + values / 16 + 64
    expected = logits_of(floats, REFERENCE)
    first = run.step({"a": PROMPT[:2], "b": PROMPT[:5]})
    second = run.step({"b": PROMPT[5:6], "a": PROMPT[2:]})
    found = torch.cat([first["a"], second["a"]]).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    other = torch.cat([first["b"], second["b"]]).cpu()
    torch.testing.assert_close(other, expected[:6], rtol=1e-4, atol=1e-4)


def test_gpt_oss_stays_near_in_bfloat16(backend: CudaBackend, tmp_path: Path) -> None:
    model, floats = test_mxfp4_experts.write(tmp_path)
    found, expected = logits_of(model, backend, dtype="bfloat16"), logits_of(floats, REFERENCE)
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error.item() < 0.06


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_has_the_logits_of_its_floats(
    name: str, backend: CudaBackend, tmp_path: Path
) -> None:
    said, store = FORMATS[name]
    model, floats = write_quantized(tmp_path, said, store, config=MIXTURE)
    run = run_of(model, backend)
    bits = {each.layout.bits for each in expert_runs(run)}
    assert bits == ({8} if name in ("fp8", "bitsandbytes, 8 bits") else {4})
    found = run.step({"a": PROMPT})["a"].cpu()
    torch.testing.assert_close(found, logits_of(floats, REFERENCE), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_experts_are_rounded_while_they_are_loaded(
    method: str, backend: CudaBackend, tmp_path: Path
) -> None:
    model = write("mixtral", tmp_path)
    expert_runs(run_of(model, backend, method))
    found, expected = (logits_of(model, each, method) for each in (backend, REFERENCE))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_are_rounded_where_a_checkpoint_says_so(backend: CudaBackend, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    write_quantized_copy(write("mixtral", tmp_path / "model"), copy, method_named("w8a8", None))
    run = run_of(copy, backend)
    assert all(each.layout.rounds for each in expert_runs(run))
    found, expected = run.step({"a": PROMPT})["a"].cpu(), logits_of(copy, REFERENCE)
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 1e-4 < error < 0.1


@pytest.mark.more
def test_experts_of_a_gguf_file_stay_in_its_blocks(backend: CudaBackend, tmp_path: Path) -> None:
    sizes: dict[str, Any] = WIDE | {"num_hidden_layers": 1, "intermediate_size": 256}
    directory = written("mixtral", tmp_path / "hf", **sizes)
    file = convert(directory, tmp_path / "x.gguf", weights="Q4_K")
    run = run_of(file, backend)
    assert all(each.layout.unit_chunks for each in expert_runs(run))
    found, expected = (
        each.step({"a": PROMPT[:4]})["a"].cpu() for each in (run, run_of(file, REFERENCE))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
