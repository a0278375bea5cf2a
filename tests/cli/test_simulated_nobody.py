"""Simulations in which some requests, or all, get no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,client,input_tokens,output_tokens\n0,a,90,5\n1,b,30,4\n")
    return path


TOO_LONG = "too long for the model or the memory of 1 page of 16 tokens. No step ran.\n"


def test_a_warning_says_why_nobody_was_answered(aioserve_here: Run, trace: Path) -> None:
    policies = ("--policy", "fcfs", "--policy", "shortest_first")
    done = aioserve_here("simulate", trace, "--num-pages", 1, *policies)
    assert done.returncode == 0
    assert done.stderr == "".join(
        f"aioserve: warning: Under {name} no request got a completion: 2 requests were {TOO_LONG}"
        for name in ("fcfs", "shortest_first")
    )
    done = aioserve_here("simulate", trace, "--num-pages", 1, "--num-requests", 1)
    assert f" completion: 1 request was {TOO_LONG}" in done.stderr
    assert aioserve_here("simulate", trace, "--num-pages", 3).stderr == ""


def test_a_sweep_says_where_nobody_was_answered(aioserve_here: Run, trace: Path) -> None:
    arguments = ("sweep", trace, "--rates", "1,2", "--jobs", 1)
    done = aioserve_here(*arguments, "--vary", "num_pages=1,9")
    assert done.returncode == 0
    assert done.stderr == (
        "aioserve: warning: Under fcfs num_pages=1 at any rate no request got a completion: "
        f"4 requests were {TOO_LONG}"
    )
    assert "never" in done.stdout


def test_a_percentile_of_requests_that_got_no_answer_is_never(
    aioserve_here: Run, trace: Path
) -> None:
    for verb in ("simulate", "sweep"):
        done = aioserve_here(verb, trace, "--num-pages", 3)
        assert (done.returncode, done.stderr) == (0, "")
        assert "never" in done.stdout
        assert "inf" not in done.stdout
