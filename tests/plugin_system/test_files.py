"""Classes of files are those that the file has now."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from aioserve.plugins.files import POLICY, class_of_file

SOURCE = """
from aioserve import SchedulingPolicy


class Mine(SchedulingPolicy):
    number = {number}
"""


def test_a_file_that_changes_within_a_second_is_run_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for number in (1, 2, 3):
        path.write_text(SOURCE.format(number=number), encoding="utf-8")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        found: Any = class_of_file(f"{path}:Mine", POLICY)
        assert found.make().number == number
    assert list(tmp_path.iterdir()) == [path]
