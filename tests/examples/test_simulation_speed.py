"""The benchmark of simulated speed has a line for each trace, of as many requests as asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import made_up_traces

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "simulation_speed.py"


@pytest.mark.parametrize("more", [(), ("--fast-only",)])
def test_each_trace_is_repeated_and_timed_both_ways(tmp_path: Path, more: tuple[str, ...]) -> None:
    trace = made_up_traces.azure(tmp_path, num_requests=30)
    done = subprocess.run(
        [sys.executable, SCRIPT, trace, "--requests", "70", *more],
        check=True,
        timeout=200,
        capture_output=True,
        text=True,
    )
    _, line = done.stdout.splitlines()
    name, requests, steps, *figures = line.split()
    assert (name, int(requests)) == (trace.name, 70)
    assert int(steps.replace(",", "")) > 70
    values = [float(figure.replace(",", "")) for figure in figures]
    assert len(values) == (3 if more else 5)
    assert values[2] * 70 / 1e6 == pytest.approx(values[0], abs=0.01)
