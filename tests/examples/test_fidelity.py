"""The fidelity benchmark compares the same requests on both sides, and ranks with noise in mind."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from aioserve.traces.request import TraceRequest
from tests.parity import tiny_models

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fidelity.py"


@pytest.fixture(scope="module")
def fidelity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fidelity", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_live_prompts_share_what_the_trace_shares(fidelity: ModuleType) -> None:
    def prompt(number: int, tokens: int, ids: tuple[int, ...], session: str = "") -> list[int]:
        return fidelity.live_prompt(TraceRequest(number, 0.0, tokens, 1, ids, 64, session), 4096)

    one, other = prompt(0, 200, (7, 8)), prompt(1, 150, (7, 8))
    assert (len(one), len(other)) == (200, 150)
    assert one[:128] == other[:128]
    assert one[128:150] != other[128:]
    assert prompt(2, 100, (7, 8)) == one[:100]
    assert prompt(0, 200, (7, 8), "session")[:64] != one[:64]
    assert prompt(0, 64, (8,)) == one[64:128]


def test_policies_are_ranked_otherwise_beyond_noise_alone(fidelity: ModuleType) -> None:
    rows = {
        "a": {"live": 1.0, "noise": 0.1, "simulated": 3.0},
        "b": {"live": 1.05, "noise": 0.0, "simulated": 2.0},
        "c": {"live": 2.0, "noise": 0.0, "simulated": 2.5},
        "d": {"live": 9.0, "noise": 0.2, "simulated": 8.0},
    }
    assert fidelity.ranked_otherwise(rows) == [("a", "c")]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_both_sides_serve_every_policy(tmp_path: Path) -> None:
    model = tiny_models.write("qwen3", tmp_path / "tiny")
    result = tmp_path / "result.json"
    sizes = ("--num-requests", "12", "--rate", "50", "--scale-lengths", "0.0625")
    limits = ("--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--repeats", "2")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--model", model, *sizes, *limits, "--json", result],
        check=True,
        timeout=170,
        capture_output=True,
        text=True,
    )
    written = json.loads(result.read_text())
    assert 0 < written["requests"] == 12 - written["left_out"]
    assert written["live_steps"]["steps"] > 0
    assert [figure["figure"].split()[0] for figure in written["figures"]] == ["ttft"] * 2 + [
        "tpot"
    ] * 2
    for figure in written["figures"]:
        assert {"fcfs", "round_robin", "cache_aware", "shortest_first"} <= figure["policies"].keys()
        for row in figure["policies"].values():
            assert row["error"] == pytest.approx(row["simulated"] / row["live"] - 1)
            assert row["error_at_live_speed"] > -1
    assert all(speed > 0 for runs in written["speeds"].values() for speed in runs)
    assert "ranking by ttft p50" in done.stdout
