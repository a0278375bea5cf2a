"""The tool that builds wheels says what is missing. `make wheels` shows that they stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "build_wheels"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("3.99", "3.99: there is no python3.99 with its venv module, on the PATH or of pyenv"),
        ("three", "three: --pythons takes versions such as 3.12, got 'three'"),
    ],
)
def test_a_python_that_is_not_there_is_named(tmp_path: Path, version: str, said: str) -> None:
    command = [sys.executable, TOOL, "--pythons", version, "--out", tmp_path / "dist"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "dist").exists()
