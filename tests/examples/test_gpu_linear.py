"""The benchmark of linear layers on a GPU, where Triton's interpreter is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_linear.py"

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not find_spec("triton"),
    reason="there is a GPU, or no Triton to interpret",
)


@pytest.mark.more
def test_every_form_is_timed_at_every_number_of_rows(tmp_path: Path) -> None:
    found = tmp_path / "linear.json"
    sizes = ["--shapes", "256x64", "--rows", "1", "20"]
    subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", *sizes, "--json", found],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        timeout=200,
    )
    rows = json.loads(found.read_text(encoding="utf-8"))
    assert {(row["rows"], row["layer"]) for row in rows} == {
        (rows, layer)
        for rows in (1, 20)
        for layer in (
            *("bfloat16", "int4/32", "int4/128+zeros", "int8/128", "w4a8/128", "w8a8"),
            *("fp8/128x128", "fp8, fp8 rows", "nf4/64"),
        )
    }
    assert all(row["seconds"] > 0 and row["shape"] == "256x64" for row in rows)


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr == "benchmarks/gpu_linear.py needs a GPU: torch finds none\n"
