"""The benchmark of shared prefixes computes each prefix once, and its arithmetic is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity import tiny_models

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "prefix_sharing.py"


@pytest.mark.slow
def test_a_prefix_is_computed_once_with_the_cache_and_each_time_without(tmp_path: Path) -> None:
    model = tiny_models.write("qwen3", tmp_path / "tiny")
    result = tmp_path / "result.json"
    sizes = ("--requests", "5", "--prefix-tokens", "96", "--tail-tokens", "3", "--repeats", "2")
    subprocess.run(
        [sys.executable, SCRIPT, "--models", model, *sizes, "--json", result],
        check=True,
        timeout=170,
    )
    (row,) = json.loads(result.read_text())
    assert row["tokens_prefilled"] == {"on": 96 + 5 * 3, "off": 5 * (96 + 3)}
    assert row["seconds"] == {side: min(row["all_seconds"][side]) for side in ("on", "off")}
    assert row["ratio"] == pytest.approx(row["seconds"]["off"] / row["seconds"]["on"])
