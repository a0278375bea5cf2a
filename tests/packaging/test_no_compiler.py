"""A build without a compiler says what to install, whether make or pip begins it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_cmake_without_a_compiler_says_what_make_says(tmp_path: Path) -> None:
    tools = Path(sys.executable).parent
    here = tmp_path / "bin"
    here.mkdir()
    for name in ("cmake", "ninja"):
        (here / name).symlink_to(tools / name)
    done = subprocess.run(
        [here / "cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path / "build"],
        env={"PATH": str(here), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = "aioserve compiles C++20: install g++ or clang++, or set CXX"
    assert done.returncode == 1
    assert said in done.stderr
    assert said in (ROOT / "Makefile").read_text(encoding="utf-8")
