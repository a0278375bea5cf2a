"""Kernels of the GPU compile for their target cards, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TARGETS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most bytes of shared memory for one program, by compute capability."""

FLOATS_BY = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Instructions of tensor cores that multiply floats, by compute capability."""

STACK_BYTES = {"first_kernel": 8}
"""Bytes of stack of kernels that spill registers. This one runs once for a row."""


@pytest.fixture
def compiled_before(pytestconfig: pytest.Config, tmp_path: Path) -> Path:
    """Return Triton's cache folder, which later runs with equal sources and compilers reuse."""
    if not pytestconfig.pluginmanager.hasplugin("cacheprovider"):
        return tmp_path / "cache"
    return pytestconfig.cache.mkdir("triton")


Compile = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def compiled(compiled_before: Path, tmp_path: Path) -> Compile:
    """Return a function that runs `compile_kernels`, and returns each kernel's resources."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(compiled_before)
        found = tmp_path / "resources.json"
        command = [sys.executable, "-m", "tests.ops.gpu.compile_kernels", *arguments]
        done = subprocess.run(
            [*command, "--json", str(found)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        return json.loads(found.read_text(encoding="utf-8"))

    return run


@pytest.mark.more
@pytest.mark.timeout(480)
def test_kernels_fit_the_cards_in_turn(compiled: Compile) -> None:
    """Each kernel is compiled for one card, and each card has a third of the kernels."""
    kernels = compiled("--in-turn")
    assert {kernel["target"] for kernel in kernels} == set(TARGETS)
    _check(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_a_card(target: int, compiled: Compile) -> None:
    kernels = compiled("--targets", str(target))
    assert all(kernel["target"] == target for kernel in kernels)
    _check(kernels)


def _check(kernels: list[dict[str, Any]]) -> None:
    assert len({kernel["kernel"] for kernel in kernels}) >= 48
    for kernel in kernels:
        assert kernel["stack_bytes"] <= STACK_BYTES.get(kernel["kernel"].split()[0], 0), kernel
        assert 0 < kernel["registers"] <= 255, kernel
        assert kernel["shared_bytes"] <= TARGETS[kernel["target"]], kernel
    for name, least in (("linear_kernel", 15), ("grouped_expert_kernel", 10)):
        layers = [one for one in kernels if one["kernel"].startswith(name)]
        assert len(layers) >= least
        _check_products(layers)
    experts = [one for one in kernels if one["kernel"].startswith("expert_kernel")]
    assert len(experts) == 5
    for one in experts:
        is_wide = "expert_kernel float32" in one["kernel"]
        assert one["products"] == ([] if is_wide else [FLOATS_BY[one["target"]]]), one


def _check_products(layers: list[dict[str, Any]]) -> None:
    """Check that one instruction multiplies for any number of rows.

    That is why a row has the same bits in any batch. Instructions for integers are exact."""
    for layer in layers:
        of_floats = FLOATS_BY[layer["target"]]
        if "float32" in layer["kernel"]:
            assert layer["products"] == []
        elif "int8 rows" in layer["kernel"]:
            assert layer["products"] in ([of_floats], ["mma.sync"]), layer
        else:
            assert layer["products"] == [of_floats], layer
