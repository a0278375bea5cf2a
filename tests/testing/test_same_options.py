"""`aioserve simulate`, `aioserve sweep` and `replay` are asked for the same, with the same
defaults."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from aioserve.cli.simulate import SimulateOptions
from aioserve.cli.sweep import SweepOptions
from aioserve.errors import ConfigError
from aioserve.simulation.simulator import simulate
from aioserve.simulation.trial_options import TrialOptions
from aioserve.testing import replay
from aioserve.traces.workload import workload

OF_PRINTING = {"json", "report", "gantt_window", "csv"}
REPLAYED = {
    name: parameter.default
    for name, parameter in inspect.signature(replay).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def test_replay_has_the_options_and_defaults_of_the_command() -> None:
    asked = {field.name: field.default for field in fields(SimulateOptions)}
    # The trace and the policy are given first; objects and callbacks can't be typed.
    assert REPLAYED.keys() - {"cost", "timeline", "on_progress"} == asked.keys() - {
        *OF_PRINTING,
        "synthetic",
        "policy",
    }
    for name in REPLAYED.keys() & asked.keys():
        assert REPLAYED[name] == asked[name], name


def test_a_sweep_has_the_options_of_a_simulation_but_for_rates_and_seeds() -> None:
    simulated = {field.name: field.default for field in fields(SimulateOptions)}
    swept = {field.name: field.default for field in fields(SweepOptions)}
    assert simulated.keys() - swept.keys() == {"rate", "seed", "gantt_window"}
    new = {"rates", "seeds", "vary", "slo", "refine", "jobs", "csv"}
    assert swept.keys() - simulated.keys() == new
    assert all(swept[name] == simulated[name] for name in swept.keys() & simulated.keys())


def test_the_one_place_of_defaults_agrees_with_all_others() -> None:
    options = {field.name: field.default for field in fields(TrialOptions)}
    assert REPLAYED.keys() - options.keys() == {"requests", "timeline", "on_progress"}
    for name, default in options.items():
        assert REPLAYED[name] == default, name
    for function in (simulate, workload):
        for name, parameter in inspect.signature(function).parameters.items():
            if name in options and parameter.default is not parameter.empty:
                assert parameter.default == options[name], (function.__name__, name)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_replay_writes_a_line_for_each_request(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    metrics = replay("tenants", "fcfs", num_requests=20, requests=path)
    lines = path.read_text().splitlines()
    assert len(lines) == 20 + (name == "a.csv")
    assert metrics.requests == 20
    assert "tenant-0" in path.read_text()


def test_replay_never_writes_over_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,client,input_tokens,output_tokens\n0,a,9,2\n")
    before = trace.read_text()
    with pytest.raises(ConfigError, match="which would be lost"):
        replay(trace, "fcfs", requests=tmp_path / "." / "trace.csv")
    assert trace.read_text() == before
