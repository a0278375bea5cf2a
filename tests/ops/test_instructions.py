"""Kernels contain the instructions that their names claim, and no slower equivalents."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from aioserve import _native

INSTRUCTIONS = {
    "avx512_vnni": r"vpdpbusd \S*%zmm",
    "avx2_vnni": r"\{vex\} vpdpbusd \S*%ymm",
    "avx512": r"vpmaddubsw \S*%zmm",
    "avx2": r"vpmaddubsw \S*%ymm",
    "avx512, 8 bits": r"vpmaddwd \S*%zmm",
    "avx2, 8 bits": r"vpmaddwd \S*%ymm",
    "avx512_bf16": r"vdpbf16ps \S*%zmm",
    "avx512_bf16, decoded": r"vcvtne2ps2bf16 \S*%zmm",
    "avx512, decoded": r"vpermps \S*%zmm",
    "avx2, decoded": r"vcvtph2ps \S*%xmm\S*,%ymm",
    "amx_bf16": "tdpbf16ps",
    "amx_int8": "tdpbsud",
}


@pytest.fixture(scope="module")
def assembly() -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these are instructions of x86-64")
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump (binutils) isn't installed")
    command = [objdump, "--disassemble", "--no-show-raw-insn", _native.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kernel", INSTRUCTIONS)
def test_a_kernel_has_the_instruction_that_its_name_claims(assembly: str, kernel: str) -> None:
    isa = kernel.partition(",")[0]
    if isa not in _native.cpu_info()["isas_compiled"]:
        pytest.skip(f"this build has no {isa}: make build ISAS=all")
    found = re.findall(INSTRUCTIONS[kernel].replace(" ", r"\s+"), assembly)
    least = 12 if kernel == "amx_int8" else 16  # tiles of bytes are loops: four for each storage
    assert len(found) >= least, f"{len(found)} of {INSTRUCTIONS[kernel]}"
