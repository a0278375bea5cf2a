"""The examples that are plain scripts run as their readers would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

Path = Callable[[str], str]


def run(path: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_the_smallest_example_streams_an_answer(example_path: Path) -> None:
    assert len(run(example_path("stream")).split()) > 2


@pytest.mark.more
def test_two_engines_end_with_every_page_given_back(example_path: Path) -> None:
    lines = run(example_path("two_engines")).splitlines()
    assert len(lines) == 2
    for stats in lines:
        numbers = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)\b", stats)}
        assert numbers["pages_held_by_requests"] == numbers["pages_fenced"] == 0
        assert numbers["pages_free"] + numbers["pages_cached"] == numbers["pages_total"] > 0
        assert numbers["num_running"] == numbers["num_waiting"] == 0
        # A third of the 32 streams was left after 5 tokens, the others may go on to 48.
        assert numbers["tokens_generated_total"] < 32 * 48


def test_two_engines_is_as_short_as_promised(example_path: Path) -> None:
    with open(example_path("two_engines"), encoding="utf-8") as file:
        body = [line for line in file if line.strip() and not line.startswith(('"""', "import"))]
    assert len([line for line in body if not line.startswith("from")]) <= 12


def test_all_but_the_last_token_of_each_thought_is_found_in_the_cache(example_path: Path) -> None:
    prompt, *tree, totals = run(example_path("tree_of_thought")).splitlines()
    assert "def load(path)" in prompt
    found = [re.findall(r"(-\d\.\d\d), (\d+) of (\d+) cached$", line) for line in tree]
    branches = [(float(value), int(cached), int(all_)) for ((value, cached, all_),) in found]
    assert len(branches) == 3 + 6 + 6
    assert all(cached == all_ - 1 for _, cached, all_ in branches)
    assert int(totals.split()[0]) < 8 + 15 * 3


@pytest.mark.more
@pytest.mark.parametrize("name", ["custom_policy"])
def test_the_policy_example_serves_short_prompts_first(example_path: Path, name: str) -> None:
    assert run(example_path(name)).strip().endswith("short, middle, long")
