"""Tests that need a GPU, on a machine without one: skipped, refused, or rehearsed on the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.place import VARIABLE

ROOT = Path(__file__).resolve().parents[3]
REHEARSED = (
    "qwen3 and (padded or swapped or float32) or callback or answered_the_same or loop_of "
    "or (ask_for_more and chunks)"
)
"""One of each kind, because all of them take many minutes."""

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card"),
]


def run(*words: str, wish: str | None, seconds: float = 170) -> subprocess.CompletedProcess[str]:
    dropped = (VARIABLE, "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    if wish is not None:
        environment[VARIABLE] = wish
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
    )


@pytest.mark.more
def test_without_a_card_they_are_skipped_for_one_reason() -> None:
    done = run(wish=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ skipped in ", done.stdout, flags=re.MULTILINE), done.stdout
    reasons = re.findall(r"^SKIPPED \[\d+\] [\w/.:]+: (.+)$", done.stdout, flags=re.MULTILINE)
    assert len(reasons) == 1
    assert reasons[0].startswith("no card: ")


@pytest.mark.more
def test_where_a_card_is_required_none_is_a_failure() -> None:
    done = run(wish="required")
    assert done.returncode == 1
    assert "these tests need a card: " in done.stdout + done.stderr


def test_a_wish_that_is_none_is_refused() -> None:
    done = run(wish="maybe")
    assert done.returncode != 0
    assert f"{VARIABLE} must be required or rehearse, or not set; got 'maybe'" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_can_be_rehearsed_passes_on_the_host() -> None:
    done = run("-k", REHEARSED, wish="rehearse", seconds=880)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 10
