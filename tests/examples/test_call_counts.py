"""The benchmark of calls counts the package's own, on and off the loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.examples.test_benchmarks import BENCHMARKS


def test_calls_of_steps_and_of_a_first_token_are_counted(tmp_path: Path) -> None:
    result = tmp_path / "counts.json"
    command = (sys.executable, BENCHMARKS / "call_counts.py", "--steps", "16", "--repeats", "1")
    done = subprocess.run(
        [*command, "--json", result], check=True, timeout=240, capture_output=True, text=True
    )
    rows = json.loads(result.read_text())
    assert list(rows) == ["decode step", "first token", "chat call"]
    for name, row in rows.items():
        assert name in done.stdout
        # The step thread has a part of each step, and the loop has the greater one.
        assert 0 < row["calls"] - row["on the loop"] < row["on the loop"]
        assert 0 < row["files"] < row["calls"]
    assert rows["decode step"]["calls"] < rows["first token"]["calls"]
