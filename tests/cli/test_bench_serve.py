"""`aioserve bench serve` against our own server, in its own process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.server_process import ServerProcess
from tests.waits import block_until

LOAD = ("--num-requests", 6, "--input-len", 20, "--output-len", 5, "--shared-prefix-len", 16)
ANSWERED = 'aioserve_http_requests_total{method="POST",route="/v1/completions",status="200"}'
KEY = "a-key-of-the-bench"


@pytest.fixture(scope="module")
def url(forking: Forks) -> Iterator[str]:
    with ServerProcess("pyhelp", forks=forking, AIOSERVE_API_KEY=KEY) as server:
        yield server.url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSERVE_BENCH_API_KEY", KEY)


def measured(run: Run, *arguments: object) -> dict[str, Any]:
    done = run("bench", "serve", *arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.more
def test_json_counts_what_the_server_counted(url: str, aioserve_here: Run) -> None:
    result = measured(aioserve_here, url, *LOAD, "--seed", 7)
    assert (result["kind"], result["url"], result["model"]) == ("serve", url, "pyhelp")
    assert not result["interrupted"]
    assert result["load"]["prompt_tokens"] == 120
    metrics = result["metrics"]
    assert (metrics["requests"], metrics["finished"], metrics["failures"]) == (6, 6, {})
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (120, 30)
    assert metrics["without_usage"] == 0
    rate = metrics["output_tokens_per_second"]
    assert rate * metrics["seconds"] == pytest.approx(30)
    assert metrics["e2e_seconds"]["p50"] >= metrics["ttft_seconds"]["p50"] > 0
    assert metrics["goodput"] is None
    assert metrics["generator"]["busy_share"] > 0


@pytest.mark.more
def test_the_same_seed_sends_the_same_prompts(url: str, aioserve_here: Run) -> None:
    first = measured(aioserve_here, url, *LOAD, "--seed", 11, "--concurrency", 1)
    again = measured(aioserve_here, url, *LOAD, "--seed", 11, "--concurrency", 1)
    # The prompts share a whole page, and the second time all of them are cached.
    assert first["metrics"]["cached_tokens"] >= 5 * 16
    assert again["metrics"]["cached_tokens"] >= 6 * 16
    assert again["metrics"]["cached_tokens"] > first["metrics"]["cached_tokens"]


def test_a_table_shows_times_rates_and_the_generator(
    url: str, aioserve_here: Run, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("result.json", "page.html", "rows.csv")}
    done = aioserve_here(
        *("bench", "serve", f"{url}/v1", *LOAD, "--rate", 200, "--concurrency", 3),
        *("--ttft-target-seconds", 1e-9, "--tpot-target-seconds", 60),
        *("--json", files["result.json"], "--report", files["page.html"]),
        *("--requests", files["rows.csv"]),
    )
    assert done.returncode == 0, done.stderr
    for shown in (
        "time to first token",
        "time per output token",
        "gap between chunks",
        "whole answer",
        "output tokens",
        "requests: 6 finished",
        "goodput: 0 met their targets, 0.0%",
        "at most 3 under way",
        "the generator: requests sent late by p99",
    ):
        assert shown in done.stdout
    assert KEY not in done.stdout
    result = json.loads(files["result.json"].read_text())
    assert result["metrics"]["goodput"]["requests"] == 0
    held = result["metrics"]["generator"]["held_seconds"]  # none if there was always room
    assert ("held for room by p99" in done.stdout) == (held is not None)
    page = files["page.html"].read_text()
    assert "aioserve bench serve" in page
    assert KEY not in page + json.dumps(result)
    head, *rows = files["rows.csv"].read_text().splitlines()
    assert head.startswith("late_seconds,held_seconds,failure,detail,request,")
    assert len(rows) == 6
    assert all(",finished," in row for row in rows)


@pytest.mark.more
def test_a_chat_and_text_prompts_are_measured_too(url: str, aioserve_here: Run) -> None:
    chat = measured(aioserve_here, url, *LOAD, "--endpoint", "chat", "--return-token-ids")
    assert chat["metrics"]["finished"] == 6
    assert chat["metrics"]["without_text"] == 0
    assert chat["metrics"]["output_tokens"] == 30
    text = measured(aioserve_here, url, *LOAD, "--prompts", "text")
    assert text["metrics"]["prompt_tokens"] >= 120


@pytest.mark.more
def test_a_trace_has_its_tenants_and_turns_of_a_closed_loop_follow(
    url: str, aioserve_here: Run
) -> None:
    common = ("--num-requests", 12, "--scale-lengths", 0.125, "--seed", 3, "--hints")
    tenants = measured(aioserve_here, url, "--synthetic", "tenants", *common, "--rate", 100)
    by_name = tenants["metrics"]["tenants"]
    assert sum(one["requests"] for one in by_name.values()) == 12
    conversations = ("--synthetic", "conversations", "--closed-loop", "--speed", 200)
    turns = measured(aioserve_here, url, *conversations, *common)
    assert turns["metrics"]["finished"] == 12
    assert turns["metrics"]["cached_tokens"] > 0


@pytest.mark.more
def test_nothing_is_sent_after_the_last_second(url: str, aioserve_here: Run) -> None:
    result = measured(
        aioserve_here, url, *LOAD[2:], "--num-requests", 500, "--rate", 10, "--max-seconds", 0.5
    )
    metrics = result["metrics"]
    assert metrics["finished"] + metrics["not_sent"] == 500
    assert metrics["not_sent"] > 400


def test_a_wrong_key_ends_it_before_the_load(
    url: str, aioserve_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = aioserve_here("bench", "serve", url, *LOAD, "--api-key", "wrong")
    assert (done.returncode, done.stdout) == (1, "")
    assert "status 401" in done.stderr
    assert "wrong" not in done.stderr
    done = aioserve_here("bench", "serve", url, *LOAD, "--api-key", KEY)
    assert done.returncode == 0, done.stderr


def test_what_the_server_refuses_ends_it_before_the_load(url: str, aioserve_here: Run) -> None:
    done = aioserve_here("bench", "serve", url, "--input-len", 100_000)
    assert (done.returncode, done.stdout) == (1, "")
    assert "a warm-up request failed, so no load was sent: status 400" in done.stderr
    assert "max_model_len" in done.stderr


def test_without_its_client_it_says_what_to_install(
    aioserve_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("client", "measure", "tables"):
        monkeypatch.delitem(sys.modules, f"aioserve.cli._http_load.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    done = aioserve_here("bench", "serve", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert "aioserve bench serve needs aiohttp: pip install 'aioserve[bench]'" in done.stderr


def test_a_load_of_which_nothing_was_answered_ends_with_1(url: str, aioserve_here: Run) -> None:
    done = aioserve_here(*("bench", "serve", url, *LOAD, "--num-warmups", 0, "--vocab-size", 10**8))
    assert done.returncode == 1
    assert "6 failed" in done.stdout
    assert "status 400: 6; the first: " in done.stdout
    assert "no request got a completion: status 400" in done.stderr


@pytest.mark.more
def test_ctrl_c_prints_what_was_measured(url: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    command = [
        *(sys.executable, "-m", "aioserve", "bench", "serve", url),
        *map(str, ("--num-requests", 10_000, "--rate", 20, *LOAD[2:])),
        *("--requests", str(rows)),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as load:
        try:
            _wait_for_requests(url)
            load.send_signal(signal.SIGINT)
            output, errors = load.communicate(timeout=160)
        finally:
            load.kill()
    assert load.returncode == 130, errors
    assert "interrupted: after" in output
    assert "never sent" in output
    assert "time to first token" in output
    assert "Traceback" not in errors
    assert ",finished," in rows.read_text()


def _wait_for_requests(url: str, at_least: int = 5) -> None:
    """Wait until the server has answered this many more requests."""
    before = _answered(url)
    block_until(lambda: _answered(url) >= before + at_least)


def _answered(url: str) -> float:
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    lines = [line for line in text.splitlines() if line.startswith(ANSWERED)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
