"""`aioserve sweep`: every run equals the one of `simulate`, in any number of processes."""

from __future__ import annotations

import csv
import html
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Run

POLICY = """
from aioserve import SchedulingPolicy


class Lifo(SchedulingPolicy):
    def __init__(self, *, most: int = 9) -> None:
        self.most = most

    def order(self, waiting, view):
        return list(reversed(waiting))


class Broken(SchedulingPolicy):
    def __init__(self) -> None:
        raise KeyError("planted")


class Leaving(SchedulingPolicy):
    def __init__(self) -> None:
        raise SystemExit(0)


class Failing(SchedulingPolicy):
    def order(self, waiting, view):
        raise KeyError("planted")


NUMBER = 7
"""


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(POLICY)
    return path


def swept(aioserve: Run, *arguments: object) -> dict[str, Any]:
    done = aioserve("sweep", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SMALL = ("--synthetic", "bursts", "--num-requests", 40)


@pytest.mark.more
def test_every_run_is_the_one_that_simulate_makes(aioserve_here: Run) -> None:
    arguments = (*SMALL, "--max-num-seqs", 4, "--policy", "fcfs", "--policy", "shortest_first")
    found = swept(aioserve_here, *arguments, "--rates", "5,20", "--seeds", 2, "--jobs", 1)
    assert [(row["policy"], row["rate"]) for row in found["rows"]] == [
        ("fcfs", 5.0),
        ("fcfs", 20.0),
        ("shortest_first", 5.0),
        ("shortest_first", 20.0),
    ]
    for row in found["rows"]:
        for seed, metrics in enumerate(row["runs"]):
            asked = (*SMALL, "--max-num-seqs", 4, "--policy", row["policy"])
            asked += ("--rate", row["rate"], "--seed", seed)
            alone = json.loads(aioserve_here("simulate", *asked, "--json").stdout)
            assert metrics == alone["policies"][row["policy"]]
        mean = sum(metrics["ttft_seconds"]["p99"] for metrics in row["runs"]) / 2
        assert row["over_seeds"]["ttft_p99_seconds"]["mean"] == pytest.approx(mean)


@pytest.mark.more
def test_processes_of_its_own_find_the_same(
    aioserve_here: Run, policy_file: Path, tmp_path: Path
) -> None:
    arguments = (*SMALL, "--rates", "5,20", "--seeds", 2, "--vary", "max_num_seqs=2,8")
    arguments += ("--policy", f"{policy_file}:Lifo:most=3")
    found, lines = [], []
    for jobs in (1, 2):
        files = [tmp_path / f"{jobs}.csv", tmp_path / f"{jobs}.jsonl"]
        more = ("--jobs", jobs, "--csv", files[0], "--requests", files[1])
        found.append(swept(aioserve_here, *arguments, *more))
        lines.append([file.read_text() for file in files])
    assert found[0]["rows"] == found[1]["rows"]
    assert lines[0] == lines[1]
    runs = list(csv.DictReader(lines[0][0].splitlines()))
    assert [(run["varied"], run["rate"], run["seed"]) for run in runs[:3]] == [
        ("max_num_seqs=2", "5.0", "0"),
        ("max_num_seqs=2", "5.0", "1"),
        ("max_num_seqs=2", "20.0", "0"),
    ]
    requests = [json.loads(line) for line in lines[0][1].splitlines()]
    assert len(requests) == 8 * 40
    assert {(r["varied"], r["seed"]) for r in requests} == {
        (f"max_num_seqs={n}", seed) for n in (2, 8) for seed in (0, 1)
    }


@pytest.mark.more
def test_the_largest_rate_is_told_that_keeps_what_is_promised(aioserve_here: Run) -> None:
    arguments = ("--synthetic", "heavy-tails", "--num-requests", 100, "--max-num-seqs", 8)
    arguments += ("--rates", "1,1000", "--slo", "ttft_p99=3,attainment=0.9", "--jobs", 1)
    arguments += ("--ttft-target-seconds", 2)
    found = swept(aioserve_here, *arguments)
    assert [row["slo_kept"] for row in found["rows"]] == [True, False]
    told = {"policy": "fcfs", "varied": "", "largest_rate": 1.0, "missed_rate": 1000.0}
    assert found["slo"] == [told]
    shown = aioserve_here("sweep", *arguments).stdout
    assert (
        "largest rate that keeps ttft_p99=3,attainment=0.9, fcfs: 1 requests/s, missed at 1,000"
        in shown
    )
    assert "with 95 % confidence" in shown


@pytest.mark.more
def test_rates_between_are_tried_where_a_promise_breaks(aioserve_here: Run, tmp_path: Path) -> None:
    lines = tmp_path / "requests.jsonl"
    arguments = (*SMALL, "--max-num-seqs", 4, "--policy", "fcfs", "--policy", "shortest_first")
    arguments += ("--rates", "200,1,100", "--seeds", 2, "--slo", "ttft_p50=3", "--jobs", 1)
    coarse = swept(aioserve_here, *arguments)
    found = swept(aioserve_here, *arguments, "--refine", 3, "--requests", lines)
    tried = [(row["policy"], row["rate"]) for row in found["rows"]]
    assert tried == sorted(tried)
    for before, after in zip(coarse["slo"], found["slo"], strict=True):
        bounds = (after["largest_rate"], after["missed_rate"])
        assert before["largest_rate"] <= bounds[0] < bounds[1] <= before["missed_rate"]
        ratio = before["missed_rate"] / before["largest_rate"]
        assert bounds[1] / bounds[0] == pytest.approx(ratio ** (1 / 8), rel=0.01)
    for row in coarse["rows"]:
        assert row in found["rows"]
    runs = sum(len(row["runs"]) for row in found["rows"])
    assert runs == 2 * 2 * (3 + 3)
    assert len(lines.read_text().splitlines()) == runs * 40


def test_nothing_is_tried_where_no_promise_breaks(aioserve_here: Run) -> None:
    arguments = (*SMALL, "--rates", "1,2", "--seeds", 1, "--jobs", 1, "--refine", 9)
    kept = aioserve_here("sweep", *arguments, "--slo", "ttft_p50=1000")
    assert "fcfs: 2 requests/s, the largest tried" in kept.stdout
    missed = aioserve_here("sweep", *arguments, "--slo", "ttft_p50=1e-6")
    assert "fcfs: none of these, missed at 1" in missed.stdout
    assert [kept.stdout.count("fcfs  "), missed.stdout.count("fcfs  ")] == [2, 2]


@pytest.mark.more
def test_a_page_is_drawn_of_all_rates(aioserve_here: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = aioserve_here(
        "sweep", *SMALL, "--rates", "5,20", "--jobs", 1, "--report", page, "--slo", "ttft_p50=99"
    )
    assert done.returncode == 0, done.stderr
    text = html.unescape(page.read_text())
    assert "aioserve sweep --synthetic bursts" in text
    assert "<dt>Largest rate, fcfs</dt><dd>20 requests/s, the largest tried</dd>" in text
    assert text.count('class="seed ') == 4 * 2 * 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "0"], "rates: '0' must be more than 0, got 0.0"),
        (["--rates", "1,a"], "rates must be numbers with commas between them, got '1,a'"),
        (["--rates", "1,"], "rates must be numbers with commas between them, got '1,'"),
        (["--rates", "nan"], "rates: 'nan' must be more than 0, got nan"),
        (["--rates", "2,2"], "rates: 2 is given twice"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--jobs", "0"], "jobs must be at least 1, got 0"),
        (["--vary", "policy=a"], "vary must be NAME=VALUE,VALUE, once for each of"),
        (["--vary", "max_num_seqs=a"], "vary: max_num_seqs must be an int, got 'a'"),
        (["--vary", "overlap=yes"], "vary: overlap must be true or false, got 'yes'"),
        (["--vary", "page_size=8,8"], "vary: a value of page_size is given twice"),
        (["--refine", "2", "--rates", "1,2"], "give --slo and --rates too"),
        (["--refine", "2", "--slo", "ttft_p99=1"], "give --slo and --rates too"),
        (["--refine", "21"], "refine must be at most 20, got 21"),
        (["--slo", "ttft=1"], "slo must be NAME=LIMIT"),
        (["--slo", "attainment=0.9"], "slo: attainment is of requests that meet their targets"),
        (["--policy", "no.py:Such"], "there is no file 'no.py'"),
        (["--requests", "a.txt"], "requests must be a file named *.csv or *.jsonl, got 'a.txt'"),
        (["--seeds", "10000", "--rates", "1,2,3,4,5,6,7,8,9,10,11"], "at most 100,000 runs"),
        (["--vary", "num_pages=100000000", "--jobs", "2"], "num_pages must be at most"),
    ],
)
def test_a_mistake_is_named(aioserve_here: Run, arguments: list[str], message: str) -> None:
    done = aioserve_here("sweep", "--synthetic", "bursts", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.more
def test_seeds_that_draw_nothing_are_refused(aioserve_here: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,context_tokens,generated_tokens\n0,10,2\n1,10,2\n")
    done = aioserve_here("sweep", path, "--seeds", 2)
    assert done.returncode == 2
    assert "seeds: nothing of a trace is drawn" in done.stderr
    found = swept(aioserve_here, path, "--rates", "1,2")
    assert [len(row["runs"]) for row in found["rows"]] == [1, 1]
    found = swept(aioserve_here, path, "--arrivals", "poisson", "--rates", "1", "--jobs", 1)
    assert [len(row["runs"]) for row in found["rows"]] == [3]


def test_a_mistake_that_only_one_run_has_ends_all(aioserve_here: Run) -> None:
    arguments = (*SMALL, "--rates", "5,20,1e-8", "--seeds", 2, "--jobs", 2)
    done = aioserve_here("sweep", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("aioserve: rate 1e-08 makes 40 requests take")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Lifo", 0, ""),
        ("Lifo:most=3", 0, ""),
        ("Lifo:most=x", 2, "'most' of policy 'Lifo' must be a whole number"),
        ("Lifo:least=3", 2, "policy 'Lifo' has no option 'least'"),
        ("Fifo", 2, "'Fifo' isn't in the file"),
        ("NUMBER", 2, "'NUMBER' is no SchedulingPolicy"),
        ("Broken", 1, "can't be made: KeyError('planted')"),
        ("Leaving", 1, "can't be made: SystemExit(0)"),
    ],
)
def test_a_policy_of_a_file_is_simulated(
    aioserve_here: Run, policy_file: Path, name: str, code: int, message: str
) -> None:
    done = aioserve_here("simulate", *SMALL, "--policy", f"{policy_file}:{name}")
    assert done.returncode == code
    assert message in done.stderr


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module_anywhere", "can't be loaded: ModuleNotFoundError"),
        ("from . import mine", "can't be loaded: ImportError"),
        ("def (", "can't be loaded: SyntaxError"),
        ("import sys\nsys.exit(0)", "can't be loaded: SystemExit(0)"),
    ],
)
def test_a_file_that_cannot_be_run_is_named(
    aioserve_here: Run, tmp_path: Path, verb: str, text: str, message: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(f"{text}\n")
    done = aioserve_here(verb, *SMALL, "--policy", f"{path}:Mine")
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_decisions_that_a_policy_failed_at_are_counted(
    aioserve_here: Run, policy_file: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs.csv"
    arguments = (*SMALL, "--seeds", 1, "--csv", runs, "--jobs", 1)
    well = aioserve_here("sweep", *arguments, "--policy", f"{policy_file}:Lifo")
    assert "policy faults" not in well.stdout
    failed = aioserve_here("sweep", *arguments, "--policy", f"{policy_file}:Failing")
    assert "policy faults" in failed.stdout
    (run,) = csv.DictReader(runs.read_text().splitlines())
    assert float(run["policy_faults"]) > 0


def test_steps_that_a_table_was_not_measured_for_are_told(
    aioserve_here: Run, tmp_path: Path
) -> None:
    table = {
        "prefill_tokens": [0, 64],
        "decode_batch": [0, 2],
        "seconds": [[0, 0.01], [0.02, 0.03]],
    }
    path, small = tmp_path / "table.json", tmp_path / "small.json"
    path.write_text(json.dumps(table | {"decode_batch": [0, 4096], "prefill_tokens": [0, 4096]}))
    small.write_text(json.dumps(table))
    arguments = (*SMALL, "--rates", "5", "--jobs", 1)
    known = aioserve_here("sweep", *arguments, "--cost-table", path)
    assert "not measured" not in known.stdout + known.stderr
    drafted = aioserve_here("sweep", *arguments, "--cost-table", small)
    assert f"aioserve: warning: {small} was not measured for" in drafted.stderr
    assert "steps of fcfs at 5 requests/s" in drafted.stderr
    assert "not measured, %" in drafted.stdout
    both = aioserve_here("sweep", *arguments, "--vary", f"cost_table={path},{small}")
    assert f"steps of fcfs cost_table={small} at 5 requests/s" in both.stderr


@pytest.mark.parametrize("numbers", ["0,4", "4,0"])
@pytest.mark.parametrize("by_trace", [True, False])
def test_drafts_are_tried_against_none(
    aioserve_here: Run, tmp_path: Path, numbers: str, by_trace: bool
) -> None:
    """A row with draft tokens has a run for each seed if nothing else is random. A row without them
    has one run."""
    path = tmp_path / "trace.csv"
    column, chance = (",acceptance", ",0.7") if by_trace else ("", "")
    rows = "".join(f"{second},10,20{chance}\n" for second in range(3))
    path.write_text(f"arrival_s,context_tokens,generated_tokens{column}\n{rows}")
    arguments = () if by_trace else ("--acceptance", "0.7")
    vary = ("--vary", f"speculation_max_tokens={numbers}", "--seeds", 2, "--jobs", 1)
    found = swept(aioserve_here, path, *arguments, *vary)
    assert sorted(len(row["runs"]) for row in found["rows"]) == [1, 2]
