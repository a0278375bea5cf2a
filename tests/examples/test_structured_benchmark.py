"""`benchmarks/structured.py` runs, and its arithmetic is what its docstring says."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_benchmarks import BENCHMARKS

SIZES = ("--requests", "3", "--output-tokens", "6", "--repeats", "2")
AGAINST = {
    "plain": "plain",
    "plain + 1": "plain",
    "neighbour": "plain + 1",
    "its steps": "plain + 1",
    "constrained": "plain",
    "one by one": "plain",
    "logprobs": "plain",
    "singly": "plain",
}


def test_neighbours_of_a_form_are_put_against_neighbours_of_none(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    script = (sys.executable, BENCHMARKS / "structured.py", "--models", "pyhelp")
    done = subprocess.run(
        [*script, *SIZES, "--json", result], check=True, capture_output=True, text=True, timeout=200
    )
    (row,) = json.loads(result.read_text())
    rates = row["all_tokens_per_second"]
    assert list(rates) == list(AGAINST)
    for side, other in AGAINST.items():
        assert row["tokens_per_second"][side] == max(rates[side])
        assert row["ratio"][side] == pytest.approx(max(rates[side]) / max(rates[other]))
        pairs = [one / two for one, two in zip(rates[side], rates[other], strict=True)]
        assert row["median_ratio"][side] == pytest.approx(statistics.median(pairs))
        assert done.stderr.count(f"pyhelp: {side},") == 2
    assert "plain + 1" in done.stdout
