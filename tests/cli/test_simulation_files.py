"""Files that `simulate` and `sweep` write: each has its own name, and none overwrites another."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from tests.cli.command import Run

TRACE = "arrival_s,client,input_tokens,output_tokens\n0,=1+1,90,5\n1,-2,9,4\n2,@mine,9,4\n"
POLICY = """
from aioserve import SchedulingPolicy

print("loaded")


class Loud(SchedulingPolicy):
    def order(self, waiting, view):
        print("asked")
        return list(waiting)


class Interrupted(SchedulingPolicy):
    def order(self, waiting, view):
        raise KeyboardInterrupt
"""

needs_a_null_device = pytest.mark.skipif(
    not Path(os.devnull).is_char_device(), reason="/dev/null is a file in some containers"
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    """Policy in a directory whose name isn't text."""
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    directory.mkdir()
    path = directory / "loud.py"
    path.write_text(POLICY)
    return path


@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("simulate", ["--report", "trace.csv"], "report: trace.csv is the trace"),
        ("simulate", ["--requests", "./trace.csv"], "requests: trace.csv is the trace"),
        ("sweep", ["--csv", "link.csv"], "csv: link.csv is the trace"),
        ("sweep", ["--report", "x/../trace.csv"], "report: x/../trace.csv is the trace"),
        ("simulate", ["--report", "a.csv", "--requests", "a.csv"], "a.csv is that of report"),
        ("sweep", ["--requests", "a.csv", "--csv", "x/../a.csv"], "a.csv is that of requests"),
        ("sweep", ["--report", "there.csv", "--csv", "there.csv"], "there.csv is that of report"),
    ],
)
def test_no_file_takes_the_place_of_another(
    aioserve_here: Run,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(trace.parent)
    Path("x").mkdir()
    Path("link.csv").symlink_to(trace)
    Path("there.csv").touch()
    done = aioserve_here(verb, "trace.csv", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert trace.read_text() == TRACE
    assert not Path("a.csv").exists()


@needs_a_null_device
def test_several_files_may_be_thrown_away(aioserve_here: Run, trace: Path) -> None:
    done = aioserve_here("sweep", trace, "--report", "/dev/null", "--csv", "/dev/null")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
def test_figures_of_a_sweep_are_printed_even_where_a_file_fails(
    aioserve_here: Run, trace: Path
) -> None:
    done = aioserve_here("sweep", trace, "--csv", "/dev/full")
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "TTFT p50, s" in done.stdout


@pytest.mark.parametrize(
    ("verb", "options", "code"),
    [
        ("simulate", ["--policy", "{}:Interrupted"], 130),
        ("sweep", ["--policy", "{}:Interrupted", "--jobs", 1], 130),
        ("sweep", ["--rates", "1,1e-12", "--jobs", 1], 2),
    ],
)
def test_a_run_that_ends_early_leaves_the_lines_of_an_earlier_one(
    aioserve_here: Run,
    trace: Path,
    policy_file: Path,
    verb: str,
    options: list[object],
    code: int,
) -> None:
    path = trace.with_name("a.jsonl")
    assert aioserve_here("simulate", trace, "--requests", path).returncode == 0
    before, names = path.read_bytes(), set(trace.parent.iterdir())
    given = [str(option).format(policy_file) for option in options]
    assert aioserve_here(verb, trace, *given, "--requests", path).returncode == code
    assert path.read_bytes() == before
    assert set(trace.parent.iterdir()) == names
    assert aioserve_here(verb, trace, "--requests", path, "--num-requests", 1).returncode == 0
    assert len(path.read_text().splitlines()) == 1
    assert set(trace.parent.iterdir()) == names


def test_lines_of_requests_go_where_a_link_leads(aioserve_here: Run, trace: Path) -> None:
    place, link = trace.with_name("place.csv"), trace.with_name("link.csv")
    place.write_text("before")
    place.chmod(0o640)
    link.symlink_to(place)
    assert aioserve_here("simulate", trace, "--requests", link).returncode == 0
    assert link.is_symlink()
    assert len(place.read_text().splitlines()) == 4
    assert place.stat().st_mode & 0o777 == 0o640


@needs_a_null_device
def test_lines_of_requests_go_into_a_device(aioserve_here: Run, trace: Path) -> None:
    nothing = trace.with_name("nothing.csv")
    nothing.symlink_to(os.devnull)
    assert aioserve_here("simulate", trace, "--requests", nothing).returncode == 0
    assert nothing.is_char_device()


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_no_spreadsheet_takes_a_name_for_a_formula(
    aioserve_here: Run, trace: Path, tmp_path: Path, verb: str
) -> None:
    lines, rows = tmp_path / "a.jsonl", tmp_path / "a.csv"
    for path in (lines, rows):
        assert aioserve_here(verb, trace, "--requests", path).returncode == 0
    tenants = [row["tenant"] for row in csv.DictReader(rows.read_text().splitlines())]
    assert tenants == ["'=1+1", "-2", "'@mine"]
    named = [json.loads(line)["tenant"] for line in lines.read_text().splitlines()]
    assert named == ["=1+1", "-2", "@mine"]


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_policy_may_lie_where_the_name_is_no_text(
    aioserve_here: Run, policy_file: Path, tmp_path: Path, verb: str
) -> None:
    files = ["--report", tmp_path / "a.html", "--requests", tmp_path / "a.csv"]
    files += ["--csv", tmp_path / "b.csv", "--jobs", 1] if verb == "sweep" else []
    arguments = ("--synthetic", "bursts", "--num-requests", 9, "--policy", f"{policy_file}:Loud")
    done = aioserve_here(verb, *arguments, *files)
    assert done.returncode == 0, done.stderr
    assert "/loud.py:Loud" in (tmp_path / "a.html").read_text()
    for path in files[3::2][:2]:
        if isinstance(path, Path):
            assert b"/caf\xe9/loud.py:Loud," in path.read_bytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("jobs", [None, 1, 2])
def test_what_policies_print_is_in_no_table(
    aioserve: Run, aioserve_here: Run, policy_file: Path, jobs: int | None
) -> None:
    arguments = ("--synthetic", "bursts", "--num-requests", 9, "--policy", f"{policy_file}:Loud")
    if jobs is None:
        done = aioserve_here("simulate", *arguments, "--json")
    else:
        run = aioserve_here if jobs == 1 else aioserve  # other processes have their own streams
        done = run("sweep", *arguments, "--seeds", 2, "--jobs", jobs, "--json")
    json.loads(done.stdout)
    assert "loaded" in done.stderr
    assert "asked" in done.stderr
