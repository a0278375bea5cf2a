"""The benchmark of beams counts fewer pages than copies would take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "beams.py"


def test_beams_take_fewer_pages_than_copies_and_both_are_printed() -> None:
    sizes = ("--beam-width", "3", "--prompt-tokens", "64", "--max-tokens", "6")
    done = subprocess.run(
        [sys.executable, SCRIPT, *sizes], check=True, capture_output=True, text=True, timeout=50
    )
    _, _, mean, most, _, steps, _ = done.stdout.splitlines()
    # Four pages of the prompt, and one of its own for each beam.
    assert mean == "| mean | 7.0 | 15.0 | 2.14 |"
    assert most.startswith("| most | 7.0 | 15.0 ")
    assert steps.startswith("5 steps with 3 beams, ")
