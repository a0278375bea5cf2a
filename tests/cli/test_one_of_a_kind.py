"""One request, one page, one token: messages use the singular."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aioserve.arguments import counted
from tests.cli.command import Run
from tests.simulation.report.pages import read

NOUNS = "requests|tokens|pages|steps|GPUs|bytes|rows|checks|clients|sequences|random examples|times"
WRONG = re.compile(rf"(?<![\d.,])1 (?:{NOUNS})\b(?!/s)")


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 pages"), (1, "1 page"), (2, "2 pages"), (1234, "1,234 pages")]
)
def test_a_count_has_the_word_that_goes_with_it(count: int, told: str) -> None:
    assert counted(count, "page", form=",") == told


def test_a_phrase_may_have_a_plural_of_its_own() -> None:
    assert counted(1, "request waits", "requests wait") == "1 request waits"
    assert counted(2000, "request waits", "requests wait") == "2000 requests wait"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,client,input_tokens,output_tokens\n0,a,1,1\n")
    return path


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--page-size", 1, "--num-pages", 1),
        ("--page-size", 1, "--num-pages", 9, "--ttft-target-seconds", 1),
        ("--max-num-seqs", 1, "--max-num-batched-tokens", 1),
        ("--page-size", 1, "--unbounded-cache"),
    ],
)
def test_a_simulation_of_one_request_tells_of_one(
    aioserve_here: Run, trace: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    report = tmp_path / "report.html"
    for verb in ("simulate", "sweep"):
        done = aioserve_here(verb, trace, *options, "--report", report)
        assert done.returncode == 0
        assert "1 request" in done.stdout
        for text in (done.stdout, done.stderr, *read(report.read_text()).shown):
            assert not WRONG.search(text), text


def test_a_plan_of_one_page_tells_of_one(aioserve_here: Run) -> None:
    for options in (("--page-size", 1), ("--gpu-memory-gib", 0.001)):
        done = aioserve_here("plan", "llama-3-8b", *options, "--context", 1)
        assert done.returncode == 0
        assert not WRONG.search(done.stdout), done.stdout
    assert "a request of 1 token." in done.stdout


def test_a_completion_of_one_token_tells_of_one(aioserve_here: Run) -> None:
    done = aioserve_here("run", "pyhelp", "--raw", "a", "--max-tokens", 1)
    assert "[1 prompt token · 1 output token · first token " in done.stderr


def test_a_rate_of_which_one_request_takes_too_long_tells_of_one(aioserve_here: Run) -> None:
    options = ("--synthetic", "bursts", "--num-requests", 1, "--rate", "1e-30")
    done = aioserve_here("simulate", *options)
    assert done.returncode == 2
    assert "makes 1 request take" in done.stderr


def test_one_check_is_one(aioserve_here: Run) -> None:
    done = aioserve_here("plugins", "check", "fcfs", "--examples", 1)
    assert done.stdout.endswith("keeps its contract: 1 random example\n")
