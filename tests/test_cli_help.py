"""Short commands start without heavy modules: `--help` and `import aioserve` load none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "cupy", "triton", "transformers", "huggingface_hub", "safetensors"}

LIST_MODULES = "import sys, json; sys.stderr.write('MODULES' + json.dumps(sorted(sys.modules)))"


def modules_after(code: str) -> tuple[set[str], str]:
    """Names of the modules that a fresh interpreter holds after `code`, and its stdout."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import atexit\natexit.register(lambda: exec({LIST_MODULES!r}))\n{code}",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.rpartition("MODULES")[2])), done.stdout


def run_as_main(*arguments: str) -> str:
    return (
        f"import runpy, sys; sys.argv = ['aioserve', *{list(arguments)!r}]\n"
        "runpy.run_module('aioserve', run_name='__main__')"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_a_short_command_imports_no_heavy_module(arguments: list[str]) -> None:
    modules, output = modules_after(run_as_main(*arguments))
    assert "aioserve" in output
    assert not modules & HEAVY


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "verb",
    [
        "run",
        "chat",
        "serve",
        "bench",
        "doctor",
        "plan",
        "simulate",
        "calibrate",
        "evaluate",
        "quantize",
        "plugins",
    ],
)
def test_the_help_of_a_verb_imports_no_heavy_module(verb: str) -> None:
    modules, output = modules_after(run_as_main(verb, "--help"))
    assert verb in output
    assert not modules & HEAVY


def test_importing_the_package_and_its_public_names_imports_no_heavy_module() -> None:
    modules, _ = modules_after("from aioserve import *")
    assert "aioserve" in modules
    assert not modules & HEAVY


def test_the_scheduler_runs_where_there_is_no_torch() -> None:
    modules, _ = modules_after("import aioserve.scheduling.scheduler, aioserve.kv.page_table")
    assert not modules & HEAVY


def test_a_heavy_import_would_be_seen() -> None:
    modules, _ = modules_after("import safetensors")
    assert modules & HEAVY == {"safetensors"}
