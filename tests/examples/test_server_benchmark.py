"""The benchmark of the server runs, and says of each stream how it ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "server.py"


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], check=True, capture_output=True, text=True, timeout=50
    )
    return done.stdout


def test_overhead_is_the_median_of_pairs() -> None:
    sizes = ("--streams", "2", "--output-tokens", "4", "--repeats", "1")
    told = run("overhead", "--models", "pyhelp", "--stream-interval", "1", "2", *sizes)
    for line, interval in zip(told.splitlines(), (1, 2), strict=True):
        assert line.startswith(f"pyhelp: 2 streams of 4 tokens, interval {interval}: in process ")
        assert "median of 1 pairs" in line


def test_each_of_many_streams_has_one_end() -> None:
    told = run("load", "--streams", "20", "--output-tokens", "4")
    assert told.startswith("pyhelp: 20 streams at once, 0 errors, 20 with exactly one end")
    assert "pages held afterwards 0" in told


def test_clients_that_vanish_leave_nothing() -> None:
    told = run("soak", "--minutes", "0.02", "--streams", "2")
    assert "'errors': 0, 'wrong ends': 0" in told
    assert "pages held by requests: 0 after a quarter, 0 at the end" in told
