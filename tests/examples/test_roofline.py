"""The comparison of roofline and profile divides the one by the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "roofline.py"


def test_every_setup_has_a_line_for_every_step(tmp_path: Path) -> None:
    lines = [
        "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time,"
        "e2e_time"
    ]
    for hardware in ("a100-80gb", "h100-80gb"):
        for count in (2, 4, 8):
            lines += [
                f"llama2-70b,{hardware},{count},512,1,10,100,50,600",
                f"llama2-70b,{hardware},{count},512,32,10,2000,60,2600",
            ]
    profile = tmp_path / "profile.csv"
    profile.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, SCRIPT, profile], check=True, timeout=200, capture_output=True, text=True
    )
    rows = [line.split() for line in done.stdout.splitlines() if "00" in line]
    rows = [row for row in rows if row[0] in ("prefill", "decoding")]
    assert len(rows) == 2 * 3 * 4
    for row in rows:
        measured, roofline, ratio = map(float, row[-3:])
        assert ratio == pytest.approx(measured / roofline, abs=0.05)
    assert ["decoding", "32", "8", "h100"] in [row[:4] for row in rows]
