"""The suite runs on the CPU on every machine: engines that name no device look for no card, here
and in programs that tests start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.config import EngineConfig
from aioserve.execution.cuda_driver import Driver
from aioserve.execution.devices import chosen_device

# A card that no engine can use, so that one which finds it says so in the log.
LIBCUDA = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { name[0] = 'T'; name[1] = 0; return 0; }
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = 1UL << 34; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 7; return 0; }
"""
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def test_an_engine_of_a_test_asks_no_driver() -> None:
    def never() -> Driver | None:
        raise AssertionError("a test's engine looks for a card")

    assert chosen_device(EngineConfig(), never) == "cpu"


@pytest.mark.skipif(COMPILER is None, reason="a driver is made of C")
def test_a_program_that_a_test_starts_says_nothing_of_cards(tmp_path: Path) -> None:
    (tmp_path / "cuda.c").write_text(LIBCUDA)
    library = ["-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run([str(COMPILER), *library, str(tmp_path / "cuda.c")], check=True)

    def errors(without: str = "") -> str:
        environment = {key: value for key, value in os.environ.items() if key != without}
        program = (
            "import asyncio, aioserve\n"
            "async def main():\n"
            "    async with aioserve.Engine(num_pages=64): pass\n"
            "asyncio.run(main())"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment | {"LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        return done.stderr

    assert errors() == ""
    found = "running on the CPU, although there is a GPU: T has compute capability 7.7"
    assert errors(without="AIOSERVE_OPS").startswith(found)
