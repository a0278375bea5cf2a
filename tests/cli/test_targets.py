"""Targets by tenant and class in `simulate` and `sweep`, and the shares that meet them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Run
from tests.simulation.report.pages import downloads


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Trace in which tenant 27 asks for little and tenant 3 for much, in two classes."""
    path = tmp_path / "trace.csv"
    rows = [
        f"{n / 50},{27 if n % 3 else 3},{200 if n % 3 else 6000},20,{'batch' if n % 2 else 'chat'}"
        for n in range(60)
    ]
    path.write_text("arrival_s,client,input_tokens,output_tokens,class\n" + "\n".join(rows))
    return path


def json_of(aioserve: Run, *arguments: object) -> dict[str, Any]:
    done = aioserve(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_tenant_and_each_class_is_told_by_the_targets_of_its_own(
    aioserve_here: Run, trace: Path, tmp_path: Path
) -> None:
    rows, page = tmp_path / "rows.csv", tmp_path / "page.html"
    arguments = ["simulate", trace, "--policy", "fcfs", "--policy", "shortest_first"]
    arguments += ["--ttft-target-seconds", "27=0.3", "--ttft-target-seconds", 60]
    arguments += ["--deadline-seconds", "batch=0.4", "--requests", rows, "--report", page]
    found = json_of(aioserve_here, *arguments)
    assert found["options"]["ttft_target_seconds"] == ["27=0.3", "60"]
    told = list(csv.DictReader(rows.read_text().splitlines()))
    for row in told:
        assert float(row["ttft_target_seconds"]) == (0.3 if row["tenant"] == "27" else 60.0)
        assert row["deadline_seconds"] == ("0.4" if row["class"] == "batch" else "")
    for policy, metrics in found["policies"].items():
        for group, column in (("tenants", "tenant"), ("classes", "class")):
            for name, theirs in metrics[group].items():
                own = [row for row in told if (row["policy"], row[column]) == (policy, name)]
                met = sum(row["met_targets"] == "True" for row in own)
                assert theirs["requests"] == len(own)
                assert theirs["goodput"]["requests"] == met
        assert metrics["overdue"] == sum(
            (row["policy"], row["ending"]) == (policy, "overdue") for row in told
        )
    assert found["policies"]["fcfs"]["overdue"] > 0
    shares = [one["tenants"]["27"]["goodput"]["share"] for one in found["policies"].values()]
    assert shares[0] < shares[1]
    shown = [line.strip() for line in aioserve_here(*arguments).stdout.splitlines()]
    for group, name in (("tenant", "27 (40)"), ("class", "chat (30)")):
        heading = shown.index(f"met their targets, by {group} (requests)")
        line = next(one for one in shown[heading:] if one.startswith(name))
        assert line.count("%") == 2
    files = downloads(page.read_text())
    head, *lines = files["classes.csv"]
    assert head[-2:] == ["met their targets: fcfs", "met their targets: shortest_first"]
    assert [line[0] for line in lines] == ["batch (30)", "chat (30)"]
    text = page.read_text()
    assert "first token within 0.3 or 60 s, ended after 0.4 s" in text
    assert "Share of requests that met their targets, of each class under each policy" in text


def test_a_sweep_tells_the_attainment_of_each_class(
    aioserve_here: Run, trace: Path, tmp_path: Path
) -> None:
    runs, page = tmp_path / "runs.csv", tmp_path / "page.html"
    arguments = ["sweep", trace, "--rates", "5,100", "--jobs", 1, "--csv", runs, "--report", page]
    arguments += ["--vary", "ttft_target_seconds=chat=0.3,5", "--slo", "attainment=0.9"]
    found = json_of(aioserve_here, *arguments)
    by_class = [
        [row["runs"][0]["classes"][name]["goodput"]["share"] for name in ("batch", "chat")]
        for row in found["rows"]
    ]
    names = ["attainment of batch", "attainment of chat"]
    told = [[row["over_seeds"][name]["mean"] for name in names] for row in found["rows"]]
    assert told == by_class
    assert by_class[1][1] < 0.5 < by_class[1][0] == 1.0  # only chat has a target
    lines = list(csv.DictReader(runs.read_text().splitlines()))
    assert [[float(line[name]) for name in names] for line in lines] == by_class
    assert "met by chat, %" in aioserve_here(*arguments).stdout
    assert "chat met their targets" in downloads(page.read_text())["rates.csv"][0]


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--ttft-target-seconds", "28=1"], "NAME=SECONDS with a tenant or a class of the trace"),
        (["--tpot-target-seconds", "27=soon"], "tpot_target_seconds of 27 must be a number"),
        (["--deadline-seconds", "0"], "deadline_seconds must be more than 0, got 0"),
    ],
)
def test_a_target_that_is_none_is_named(
    aioserve_here: Run, trace: Path, verb: str, given: list[str], said: str
) -> None:
    done = aioserve_here(verb, trace, *given)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
