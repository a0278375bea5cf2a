"""Kernel files of each instruction set: those that `native/isas.cmake` lists define what a row of
`native/dispatch.cpp` names. A build for one instruction set alone links nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nanobind
import pytest

from aioserve import _native

NATIVE = Path(__file__).parents[2] / "native"
LISTED = {
    name: [f"{file}.cpp" for file in files.split()]
    for name, files in re.findall(
        r"set\(FILES_(\w+)\s+([^)]*)\)", (NATIVE / "isas.cmake").read_text()
    )
}
DISPATCH = (NATIVE / "dispatch.cpp").read_text()
ROWS = dict(re.findall(r'AIOSERVE_ADD_ISA\("(\w+)",(.*?)\);', DISPATCH, re.DOTALL))


FLAGS_OF_PORTABLE = re.compile(
    r"^build \S+/_native\.dir/native/(\S+_portable\.cpp)\.o:.*?^  FLAGS = (.*?)$",
    re.MULTILINE | re.DOTALL,
)


def defined_in(file: str) -> set[str]:
    text = (NATIVE / file).read_text()
    return set(re.findall(r"extern constexpr \w+ (k\w+) =", text))


def named_in(row: str) -> set[tuple[str, str]]:
    """Folders and names of the constants of a row."""
    found: set[tuple[str, str]] = set()
    for scope, name in re.findall(r"&(?:(\w+)::)?(k\w+)", row):
        folder = {"ints": "linear/grouped", "codes": "linear/decoded"}.get(scope)
        is_tiles = name.endswith(("Float32", "Bfloat16")) and folder is None
        found.add((folder or ("linear" if is_tiles else "ops"), name))
    return found


@pytest.mark.parametrize("name", LISTED)
def test_the_files_of_an_instruction_set_define_its_kernels(name: str) -> None:
    if name == "portable":
        tables = "&kPortable, &kPortableFloat32, &kPortableBfloat16, &ints::kPortable"
        row = tables + ", &codes::kPortableFloat32, &codes::kPortableBfloat16"
    else:
        row = ROWS[name]
    files = {*LISTED[name]} | {*LISTED["portable"]}
    defined = {(str(Path(f).parent), constant) for f in files for constant in defined_in(f)}
    assert named_in(row) - defined == set()
    needless = [
        f
        for f in {*LISTED[name]} - {*LISTED["portable"]}
        if not {(str(Path(f).parent), constant) for constant in defined_in(f)} & named_in(row)
    ]
    assert needless == []


def test_every_kernel_file_and_row_belongs_to_an_instruction_set() -> None:
    files = {str(p.relative_to(NATIVE)) for p in NATIVE.rglob("*.cpp")}
    kernels = {file for file in files if re.search(r"/(kernels|tile)_\w+\.cpp$", file)}
    assert kernels == {file for listed in LISTED.values() for file in listed}
    assert LISTED.keys() == {"portable", *ROWS}


def test_one_that_isnt_compiled_is_named_with_those_that_are() -> None:
    info = _native.cpu_info()
    runs = [*info["isas_supported"], *info["isas_emulated"]]
    compiled = info["isas_compiled"]
    assert {*runs} <= {*compiled} <= {*LISTED}
    before = info["isa"]
    for name in {*LISTED} - {*runs}:
        lacks = "supported by this CPU" if name in compiled else "in this build"
        elsewhere = "isa must be one of"  # another architecture's
        with pytest.raises(ValueError, match=f"isa='{name}' is not {lacks}|{elsewhere}"):
            _native.set_isa(name)
    assert _native.cpu_info()["isa"] == before


@pytest.mark.parametrize("isas", ["all", "native", "portable"])
def test_portable_kernels_are_compiled_for_speed_unless_a_checkout_has_better_ones(
    isas: str, tmp_path: Path
) -> None:
    tools = Path(sys.executable).parent
    command = [tools / "cmake", "-G", "Ninja", "-S", NATIVE.parent, "-B", tmp_path]
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    subprocess.run(
        [*command, *options, f"-DAIOSERVE_ISAS={isas}"],
        env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        timeout=200,
        check=True,
    )
    flags = dict(FLAGS_OF_PORTABLE.findall((tmp_path / "build.ninja").read_text()))
    has_better = isas == "native" and _native.cpu_info()["best_isa"] != "portable"
    optimized = {re.findall(r"-O\S", flags[file])[-1] for file in LISTED["portable"]}
    assert optimized == {"-O1" if has_better else "-O3"}
