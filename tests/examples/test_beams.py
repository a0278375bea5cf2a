"""The benchmark of beams counts fewer pages than copies would take."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "beams.py"


def test_beams_take_fewer_pages_than_copies_and_both_are_printed() -> None:
    sizes = ("--beam-width", "3", "--prompt-tokens", "64", "--max-tokens", "6", "--questions", "2")
    done = subprocess.run(
        [sys.executable, SCRIPT, *sizes], check=True, capture_output=True, text=True, timeout=200
    )
    _, _, mean, most, _, steps, _, followed = done.stdout.splitlines()
    # Four pages of the prompt, and one of its own for each beam.
    assert mean == "| mean | 7.0 | 15.0 | 2.14 |"
    assert most.startswith("| most | 7.0 | 15.0 ")
    assert steps.startswith("5 steps with 3 beams, ")
    # Five rounds behind the first of either search, unless one ends before.
    found = re.fullmatch(
        r"(\S+) of beams had their likeliest token, and all of them in (.+) of (\d+) rounds",
        followed,
    )
    assert found is not None
    assert float(found[1]) >= float(found[2])
    assert 0 < int(found[3]) <= 10
