"""The Makefile in a checkout that nothing has been installed in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_the_first_command_of_a_checkout_may_be_any(tmp_path: Path) -> None:
    """The recipes need only what is there before anything is installed."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    for name in ("native", "tests"):
        (tmp_path / name).mkdir()
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    environment.pop("WORKERS", None)
    for target, workers in (("run", 0), ("test", 1), ("test-more", 2), ("test-isas", 1)):
        done = subprocess.run(
            ["make", "--dry-run", target],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), target
        found = re.findall(r"--numprocesses (\d+) ", done.stdout)
        assert len(found) == done.stdout.count("--numprocesses") == workers, target
        assert all(1 <= int(number) <= 8 for number in found)
