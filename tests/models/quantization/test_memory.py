"""Loading needs little memory in addition to the weights that it makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.testing.random_model import write_random_model
from tests.models.quantization.writers import CONFIG

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
BESIDE_BYTES = 32 << 20
"""Memory for decoded blocks, threads, and the allocator's reserves, in bytes.

It is less than two of the largest weights in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    return write_random_model(directory, CONFIG | SIZES, dtype="bfloat16")


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_loading_takes_little_more_than_the_integers(model: Path, method: str):
    code = (
        "import resource, sys\n"
        "from aioserve.formats.weights import NATIVE\n"
        "from aioserve.models.files import model_files\n"
        "from aioserve.models.reading import WeightReading\n"
        "def peak():\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "files, method = model_files(sys.argv[1]), sys.argv[2]\n"
        "with WeightReading(files, formats=NATIVE, quantization=method) as reading:\n"
        "    before = peak()\n"
        "    weights = reading.read()\n"
        "print(peak() - before, sum(kernel.num_bytes for kernel in weights.linears.values()),\n"
        "    weights.memory.held_bytes)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(model), method],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    grown, packed, counted = map(int, told.stdout.split())
    assert grown < 1.15 * packed + BESIDE_BYTES
    assert packed < counted < 1.2 * packed + BESIDE_BYTES
