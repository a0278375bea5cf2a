"""Loads the files of `examples/`, which are programs and no package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.cli.forked import Forks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BENCHMARKS = EXAMPLES.with_name("benchmarks")

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import an example anew, under its file's name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(name)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def example_path() -> Callable[[str], str]:
    """Return the path of an example, by its name."""
    return lambda name: str(EXAMPLES / f"{name}.py")


@pytest.fixture
def script(forking: Forks) -> Script:
    """Runs a benchmark with words to its end, in a process of its own that has torch already."""

    def run(name: str, *words: object) -> subprocess.CompletedProcess[str]:
        path = BENCHMARKS / name
        return forking.run(list(map(str, words)), environment=os.environ, seconds=200, program=path)

    return run
