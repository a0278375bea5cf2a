"""The fidelity benchmark compares the same requests on both sides, and ranks with noise in mind."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from aioserve import SchedulingPolicy
from aioserve.simulation.cost import CostTable
from aioserve.simulation.simulator import simulate
from aioserve.traces.trace_request import TraceRequest
from tests import made_up_traces
from tests.parity import tiny_models

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fidelity.py"


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # for what it imports from beside it
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
    simulated = {"a": 3.0, "b": 2.0, "c": 2.5, "d": 8.0}
    rows = {name: {"simulated": seconds} for name, seconds in simulated.items()}
    repeated = {
        "a": [1.0, 1.1, 1.2],
        "b": [1.05, 1.09, 1.21],  # now before, now behind a
        "c": [2.0, 2.2, 2.4],  # as the machine slows down, twice a all the time
        "d": [9.0, 9.1, 9.0],
    }
    decided, otherwise = sys.modules["fidelity_figures"].ranked(rows, repeated)
    assert decided == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")]
    assert otherwise == [("a", "c")]


def test_what_is_further_apart_than_repetitions_or_a_tie_is_decided(fidelity: ModuleType) -> None:
    rows = {"a": {"simulated": 1.0}, "b": {"simulated": 2.0}}
    for other, is_decided in (([1.015] * 3, False), ([1.03] * 3, True), ([1.1, 1.5, 1.2], False)):
        decided, _ = sys.modules["fidelity_figures"].ranked(rows, {"a": [1.0] * 3, "b": other})
        assert bool(decided) == is_decided


def test_blocks_come_one_after_the_other_and_keep_their_own_pace(fidelity: ModuleType) -> None:
    trace = [TraceRequest(n, 3.0 + 0.5 * n, 8, 1, (), 8) for n in range(7)]
    blocks = fidelity.blocks_of(trace, 3)
    assert [len(block) for block in blocks] == [3, 3, 1]
    assert [[r.arrival_seconds for r in block] for block in blocks] == [
        [0.0, 0.5, 1.0],
        [0.0, 0.5, 1.0],
        [0.0],
    ]
    apart, firsts = fidelity.set_apart(blocks)
    assert [r.number for r in apart] == list(range(7))
    assert firsts == [0, 3, 6]
    assert [r.arrival_seconds for r in apart] == [0, 0.5, 1, 1e4, 1e4 + 0.5, 1e4 + 1, 2e4]


def test_a_simulated_block_has_the_speed_of_its_own(fidelity: ModuleType) -> None:
    trace = [TraceRequest(n, 3.0 * n, 8, 1, (), 8) for n in range(6)]
    apart, firsts = fidelity.set_apart(fidelity.blocks_of(trace, 2))
    table = CostTable([0, 64], [0, 4], [[0.5, 0.5], [0.5, 0.5]])
    cost = fidelity.ScaledSteps(table, [1.0, 4.0, 2.0], firsts)
    result = simulate(apart, SchedulingPolicy(), cost=cost, num_pages=None)
    took = [(r.first_token_seconds or 0.0) - (r.started_seconds or 0.0) for r in result.requests]
    assert took == [0.5, 0.5, 2.0, 2.0, 1.0, 1.0]


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
def test_both_sides_serve_the_policies_and_the_trace_that_are_given(tmp_path: Path) -> None:
    model = tiny_models.write("qwen3", tmp_path / "tiny")
    result = tmp_path / "result.json"
    trace = made_up_traces.mooncake(tmp_path)
    sizes = ("--num-requests", "12", "--rate", "50", "--scale-lengths", "0.03125")
    chosen = ("--trace", trace, "--policy", "fcfs", "--policy", "round_robin:chunk_size=8")
    limits = ("--max-num-seqs", "2", "--max-num-batched-tokens", "32")
    turns = ("--repeats", "2", "--block", "4")
    words = (*chosen, *sizes, *limits, *turns, "--json", result)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--model", model, *words],
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
    assert written["blocks"] == 3
    for runs in written["speeds"].values():
        assert [len(blocks) for blocks in runs] == [3, 3]
        assert all(speed > 0 for blocks in runs for speed in blocks)
    assert all(seconds > 0 for seconds in written["host"].values())
    assert "this machine decides" in done.stdout
    assert "by ttft p50: the noise decides " in done.stdout
    assert "of 4 pairs decided, " in done.stdout
