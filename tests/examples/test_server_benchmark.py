"""The benchmarks of servers run, and say of each stream how it ended."""

from __future__ import annotations

import re

import pytest

from tests.cli.forked import Forks
from tests.cli.server_process import ServerProcess
from tests.examples.conftest import Script


def said(script: Script, *words: str) -> str:
    done = script("server.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.more
def test_overhead_is_the_median_of_pairs(script: Script) -> None:
    sizes = ("--streams", "2", "--output-tokens", "4", "--repeats", "1")
    told = said(script, "overhead", "--models", "pyhelp", "--stream-interval", "1", "2", *sizes)
    for line, interval in zip(told.splitlines(), (1, 2), strict=True):
        assert line.startswith(f"pyhelp: 2 streams of 4 tokens, interval {interval}: in process ")
        assert "median of 1 pairs" in line


def test_each_of_many_streams_has_one_end(script: Script) -> None:
    told = said(script, "load", "--streams", "20", "--output-tokens", "4")
    assert told.startswith("pyhelp: 20 streams at once, 0 errors, 20 with exactly one end")
    assert "pages held afterwards 0" in told


@pytest.mark.more
def test_clients_that_vanish_leave_nothing(script: Script) -> None:
    told = said(script, "soak", "--minutes", "0.02", "--streams", "2")
    assert "'errors': 0, 'wrong ends': 0" in told
    assert "pages held by requests: 0 after a quarter, 0 at the end" in told


@pytest.mark.more
def test_servers_that_run_are_compared_on_the_same_streams(script: Script, forking: Forks) -> None:
    with ServerProcess("--served-model-names", "served", forks=forking) as server:
        url = server.url.removeprefix("http://")
        sizes = ("--vocab-size", "1000", "--repeats", "1", "--pause-seconds", "0", "--works")
        done = script("beside.py", f"ours={url}", f"other={url}", *sizes, "one", "many")
        short = script("beside.py", f"ours={url}", "--works", "one", "--vocab-size", "100000")
    assert done.returncode == 0, done.stderr
    title, ours, other, *_ = done.stdout.splitlines()
    assert title == "one: one of 128 tokens, 128 out"
    assert re.fullmatch(r"  ours [\d,]+ tokens/s", ours)
    assert re.fullmatch(r"  other [\d,]+ tokens/s; the first to it [\d.]+ \([\d. to]+\)", other)
    assert short.returncode == 1
    assert short.stderr.startswith("ours: status 400")


@pytest.mark.more
def test_a_server_that_is_not_there_is_named(script: Script) -> None:
    done = script("beside.py", "ours=127.0.0.1:1", "--works", "one")
    assert done.returncode == 1
    assert done.stderr.startswith("ours: ConnectionRefusedError")
    done = script("beside.py", "127.0.0.1:1")
    assert done.returncode == 2
    assert "expected NAME=HOST:PORT, got '127.0.0.1:1'" in done.stderr


def test_the_load_generator_says_what_a_chunk_costs_it(script: Script) -> None:
    sizes = ("--streams", "3", "--requests", "6", "--output-tokens", "5")
    done = script("load_generator.py", *sizes)
    assert done.returncode == 0, done.stderr
    assert re.match(r"30 chunks of 6 streams, 3 at once: \d+\.\d us of a processor", done.stdout)
