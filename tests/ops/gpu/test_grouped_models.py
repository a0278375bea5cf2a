"""Whole models whose weights are integers on the GPU: their reading and their results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from aioserve.formats.weights import CUDA, GroupedRows, PackedLinear
from aioserve.models import weight_memory
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import method_named
from aioserve.models.reading import ReadWeights, WeightReading
from aioserve.models.weight_integers import WeightIntegers
from aioserve.ops import Backend
from aioserve.ops.gpu.backend import CudaBackend
from tests.models.quantization.blockwise import load_in, storing_four_bits
from tests.models.quantization.compressed import write_mixture
from tests.models.quantization.test_gptq_awq import write_gptq
from tests.models.quantization.writers import write_quantized
from tests.ops.gpu import held as in_memory
from tests.ops.gpu.interpreter import round_bfloat16_to_nearest
from tests.ops.scenarios import REFERENCE
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import write

round_bfloat16_to_nearest()

PROMPT = [5, 9, 200, 31, 77, 8, 120, 3, 150]


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend("cuda" if torch.cuda.is_available() else "cpu")


def logits_of(
    model: Path, backend: Backend, quantization: str | None = None, dtype: str = "float32"
) -> torch.Tensor:
    decoder = load_model(model, dtype=dtype, backend=backend, quantization=quantization)
    return PagedRun(decoder).step({"a": PROMPT})["a"].cpu()


def read(model: Path, quantization: str | None = None) -> ReadWeights:
    with WeightReading(
        model_files(model), dtype="bfloat16", formats=CUDA, quantization=quantization
    ) as weights:
        return weights.read()


def held_of(linear: object) -> PackedLinear:
    assert isinstance(linear, PackedLinear)
    return linear


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for name in ("qwen2", "gemma2", "gpt2") for method in ("int8", "int4")),
        ("gpt2", "fp8"),
    ],
)
def test_logits_are_those_of_the_dequantised_model(
    backend: CudaBackend, name: str, method: str, tmp_path: Path
) -> None:
    """Models have biases, a tied head, and weights that files store transposed."""
    model = write(name, tmp_path)
    found, expected = (logits_of(model, each, method) for each in (backend, REFERENCE))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_integers_of_other_bits_are_held_in_the_next_more() -> None:
    values = np.arange(-16, 16, dtype=np.int8).reshape(1, 32)
    ones = np.ones((1, 1), np.float32)
    (rows,) = in_memory.held([WeightIntegers(values, ones, None, None, 32, 5)], torch.float32).runs
    assert isinstance(rows, GroupedRows)
    assert rows.bits == 8
    assert np.array_equal(rows.values[0], values)


def test_a_large_tied_embedding_is_held_once_as_integers(
    backend: CudaBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write("qwen3", tmp_path)
    twice, kept_twice = read(model, "int8"), logits_of(model, backend, "int8")
    monkeypatch.setattr(weight_memory, "TWO_COPIES_BYTES", 0)
    once = read(model, "int8")
    assert twice.layout.has_table
    assert not once.layout.has_table
    assert once.config.embedding not in once.arrays
    assert isinstance(once.linears[once.layout.head], PackedLinear)
    values = once.config.embedding.rows * once.config.embedding.columns
    assert twice.memory.held_bytes - once.memory.held_bytes == 2 * values
    assert torch.equal(logits_of(model, backend, "int8"), kept_twice)


def test_all_layers_of_a_quantised_model_are_held_as_integers(tmp_path: Path) -> None:
    weights = read(write("qwen3", tmp_path), "int4")
    assert set(weights.linears) == {weights.layout.head, *weights.config.linears}
    for described, held in weights.linears.items():
        assert isinstance(held, PackedLinear)
        (run,) = held.runs
        assert isinstance(run, GroupedRows)
        assert run.bits == (8 if described == weights.layout.head else 4)
        assert not run.rounded_activations
        assert not any(tensor in weights.arrays for tensor in described.weights[1:])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("method", "rounds"), [("w8a8", True), ("int8", False), ("fp8", True)])
def test_a_checkpoint_says_whether_activations_are_rounded(
    backend: CudaBackend, method: str, rounds: bool, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    model = write("llama3", tmp_path / "model")
    write_quantized_copy(model, copy, method_named(method, None))
    weights = read(copy)
    runs = [run for held in map(held_of, weights.linears.values()) for run in held.runs]
    assert {run.rounded_activations for run in runs if isinstance(run, GroupedRows)} == {rounds}
    found, expected = (logits_of(copy, each) for each in (backend, REFERENCE))
    if rounds:
        error = (found - expected).square().mean().sqrt() / expected.std()
        assert 1e-4 < error < 0.1
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["gptq", "nf4"])
def test_columns_in_another_order_and_codes_give_the_logits_of_their_floats(
    backend: CudaBackend, method: str, tmp_path: Path
) -> None:
    if method == "gptq":
        model, floats = write_gptq(tmp_path, 4, 16, act_order=True)
    else:
        store = storing_four_bits("nf4", 64, double=16)
        model, floats = write_quantized(tmp_path, load_in(4), store)
    found, expected = logits_of(model, backend), logits_of(floats, REFERENCE)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    runs = [run for held in read(model).linears.values() for run in held_of(held).runs]
    assert all(isinstance(run, GroupedRows) and run.bits == 4 for run in runs)
    if method == "gptq":
        assert all(isinstance(run, GroupedRows) and run.order is not None for run in runs)


def test_layers_of_a_mixture_of_formats_are_joined(backend: CudaBackend, tmp_path: Path) -> None:
    """Queries and keys have 4 bits, values 8."""
    model, _ = write_mixture(tmp_path)
    found, expected = (logits_of(model, each) for each in (backend, REFERENCE))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    runs = {
        tuple(run.bits for run in held.runs if isinstance(run, GroupedRows))
        for held in read(model).linears.values()
        if isinstance(held, PackedLinear)
    }
    assert runs == {(4, 8), (8,)}, "queries and keys, then values; FP8; all else is floats"


def test_bfloat16_stays_near_the_dequantised_model(backend: CudaBackend, tmp_path: Path) -> None:
    model = write("qwen3", tmp_path)
    found = logits_of(model, backend, "int4", "bfloat16")
    expected = logits_of(model, REFERENCE, "int4")
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error.item() < 0.06
