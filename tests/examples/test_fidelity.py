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
from tests import made_up_traces
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


def test_pairs_are_decided_and_ranked_otherwise_beyond_noise_alone(fidelity: ModuleType) -> None:
    rows = {
        "a": {"live": 1.0, "noise": 0.1, "simulated": 3.0},
        "b": {"live": 1.05, "noise": 0.0, "simulated": 2.0},
        "c": {"live": 2.0, "noise": 0.0, "simulated": 2.5},
        "d": {"live": 9.0, "noise": 0.2, "simulated": 8.0},
    }
    decided, otherwise = fidelity.ranked(rows)
    assert decided == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")]
    assert otherwise == [("a", "c")]


@pytest.mark.parametrize("given", [("fcfs",), ("fcfs", "fcfs"), ("fcfs", "deadline", "fcfs")])
def test_a_policy_is_compared_with_another(
    fidelity: ModuleType,
    given: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for name in given for word in ("--policy", name)]
    monkeypatch.setattr(sys, "argv", ["fidelity.py", *words])
    with pytest.raises(SystemExit):
        fidelity.parse_arguments()
    assert "--policy: give two or more, each once" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--policy", "fcfs", "--policy", "fcfs:a=1"])
    assert fidelity.parse_arguments().policy == ["fcfs", "fcfs:a=1"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_both_sides_serve_the_policies_and_the_trace_that_are_given(tmp_path: Path) -> None:
    model = tiny_models.write("qwen3", tmp_path / "tiny")
    result = tmp_path / "result.json"
    trace = made_up_traces.mooncake(tmp_path)
    sizes = ("--num-requests", "12", "--rate", "50", "--scale-lengths", "0.03125")
    chosen = ("--trace", trace, "--policy", "fcfs", "--policy", "round_robin:chunk_size=8")
    limits = ("--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--repeats", "2")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--model", model, *chosen, *sizes, *limits, "--json", result],
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
        assert figure["policies"].keys() == {"fcfs", "round_robin:chunk_size=8"}
        assert (figure["pairs"], figure["decided"]) in [(1, 0), (1, 1)]
        assert len(figure["ranked_otherwise"]) <= figure["decided"]
        for row in figure["policies"].values():
            assert row["error"] == pytest.approx(row["simulated"] / row["live"] - 1)
            assert row["error_at_live_speed"] > -1
    assert all(speed > 0 for runs in written["speeds"].values() for speed in runs)
    assert "by ttft p50: the noise decides " in done.stdout
    assert "of 4 pairs decided, " in done.stdout
