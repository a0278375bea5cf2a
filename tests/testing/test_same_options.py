"""`aioserve simulate`, `aioserve sweep` and `replay` are asked for the same: each option is
declared once, and flags and arguments are made of it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from aioserve.cli.simulate import FLAGS as SIMULATED
from aioserve.cli.sweep import FLAGS as SWEPT
from aioserve.errors import ConfigError
from aioserve.simulation.options import TrialOptions
from aioserve.simulation.simulator import simulate
from aioserve.testing import replay

DECLARED = {field.name for field in fields(TrialOptions)}


def test_every_option_of_a_trial_has_a_flag_but_for_objects() -> None:
    assert DECLARED - set(SIMULATED) == {"cost"}
    assert set(SIMULATED) - DECLARED == {
        *("policy", "synthetic", "requests", "json", "report", "gantt_window")
    }
    assert len(set(SIMULATED)) == len(SIMULATED)


def test_a_sweep_has_the_flags_of_a_simulation_but_for_rates_and_seeds() -> None:
    assert set(SIMULATED) - set(SWEPT) == {"rate", "seed", "gantt_window"}
    new = {"rates", "seeds", "vary", "slo", "refine", "jobs", "csv"}
    assert set(SWEPT) - set(SIMULATED) == new
    assert len(set(SWEPT)) == len(SWEPT)


def test_a_signature_shows_the_options() -> None:
    replayed = inspect.signature(replay).parameters
    assert list(replayed)[:2] == list(inspect.signature(simulate).parameters)[:2]
    assert list(replayed)[:2] == ["trace", "policy"]
    assert set(replayed) - DECLARED == {*("trace", "policy", "requests", "timeline", "on_progress")}
    assert replayed["page_size"].default == 16
    assert replayed["page_size"].kind is inspect.Parameter.KEYWORD_ONLY


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="page_siz"):
        replay("bursts", "fcfs", page_siz=4)  # pyright: ignore[reportCallIssue]


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
