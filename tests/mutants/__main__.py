"""Plants each bug of `planted/` in a copy of the repository and sees whether its tests fail.

    python -m tests.mutants [--only NAME ... | --draw N] [--tier first] [--jobs 1]

A bug counts as found when a test fails or the interpreter crashes. It doesn't count when the copy
fails to compile or import, or when its tests don't end. Ends with status 1 unless all are found.
Before any bug is planted, all the tests must pass in the copy.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aioserve import _native
from tests.mutants.mutant import ROOT, Mutant, StaleMutantError, load_mutants
from tests.tiers import TIERS

COPIED = ("aioserve", "aioserve_main", "benchmarks", "docs", "examples", "native", "plugins",
          "tests", "CMakeLists.txt", "pyproject.toml")  # fmt: skip
LIMIT_SECONDS = 600
"""Time limit of a compiler, and of the tests of one bug."""
LIMIT_SECONDS_OF_ALL = 3600
"""Time limit of the tests of all bugs, before any is planted."""
LIMIT_KIBIBYTES = 8 * 2**20
"""Limit of address space: a planted bug may make something grow for ever."""
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Setting against stale bytecode: Python tells a changed source only by its size and its time in
seconds."""
OUTPUT_CHARS = 2000
"""Characters shown of the output of a command that fails."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
PLACES = "import aioserve, aioserve._native as n, aioserve_plugins as p; " \
         "print(aioserve.__file__, n.__file__, p.__file__)"  # fmt: skip


class BrokenCopyError(Exception):
    """The copy can't be built, imported or tested."""


class Copy:
    """The repository in a directory of its own, with a Python that imports nothing else of it."""

    def __init__(self, directory: Path, *, native: bool, tier: str | None) -> None:
        self.tier = [f"--tier={tier}"] if tier else ["--hypothesis-profile=planted-bugs"]
        self.tree = directory / "tree"
        self.build = directory / "build"
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, self.tree / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(source, self.tree / name)
        self._make_python(directory / "venv")
        if native:
            self._configure()
            self.compile()
        else:
            shutil.copy(_native.__file__, self.tree / "aioserve")
        self._check_places()

    def _make_python(self, place: Path) -> None:
        """Make an environment with the installed packages, without their `.pth` files. One of these
        makes the repository importable."""
        venv.create(place, symlinks=True)
        self.python = place / "bin" / "python"
        paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
        installed = dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib"))
        lines = [str(self.tree), str(self.tree / "plugins"), *installed]
        (Path(paths["purelib"]) / "copy.pth").write_text("\n".join(lines), encoding="utf-8")

    def _configure(self) -> None:
        nanobind = self._output(sys.executable, "-m", "nanobind", "--cmake_dir").strip()
        self._output(
            *("cmake", "-G", "Ninja", "-S", self.tree, "-B", self.build),
            *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"),
            "-DCMAKE_BUILD_TYPE=None",  # as compiled for use, but without the slow link
        )

    def compile(self) -> None:
        self._output("cmake", "--build", self.build)
        (module,) = self.build.glob("_native.*.so")
        shutil.copy(module, self.tree / "aioserve")

    def _check_places(self) -> None:
        for place in self._output(self.python, "-c", PLACES).split():
            if not Path(place).resolve().is_relative_to(self.tree.resolve()):
                raise BrokenCopyError(f"{place} is imported, which isn't in the copy {self.tree}")

    def _output(self, *command: str | Path) -> str:
        path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.tree,
            env=os.environ | NO_BYTECODE | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        if done.returncode:
            output = done.stdout[-OUTPUT_CHARS:] + done.stderr[-OUTPUT_CHARS:]
            raise BrokenCopyError(f"{' '.join(map(str, command))}\n{output}")
        return done.stdout

    def test(
        self, tests: Sequence[str], limit_seconds: float = LIMIT_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run the tests up to the first that fails, with the same random choices every time."""
        limited = ("sh", "-c", f'ulimit -v {LIMIT_KIBIBYTES}; exec "$@"', "sh")
        # Behind a test with a RecursionError, what schemathesis imports at the end can't be parsed.
        plugins = ("-p", "no:cacheprovider", "-p", "no:schemathesis")
        options = ("-x", "-q", *plugins, *self.tier)
        return subprocess.run(
            [*limited, str(self.python), "-m", "pytest", *options, *tests],
            cwd=self.tree,
            env=os.environ | NO_BYTECODE,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_seconds,
        )

    def check_tests_pass(self, tests: Sequence[str]) -> None:
        result = self.test(tests, LIMIT_SECONDS_OF_ALL)
        if result.returncode:
            raise BrokenCopyError(
                f"the tests fail without a planted bug\n{result.stdout[-OUTPUT_CHARS:]}"
            )

    def finds(self, mutant: Mutant) -> tuple[bool, str]:
        """Return true if a test fails with the bug, and which, or what happened instead."""
        path = self.tree / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(mutant.planted_in(source), encoding="utf-8")
        try:
            if mutant.is_native:
                self.compile()
            result = self.test(mutant.tests)
        except BrokenCopyError as error:
            return False, f"doesn't compile: {error}"
        except subprocess.TimeoutExpired:
            return False, f"no end within {LIMIT_SECONDS} s"
        finally:
            path.write_text(source, encoding="utf-8")
        if result.returncode == 0:
            return False, "survived"
        if result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            return False, "none of its tests is in the tier"
        if result.returncode < 0:
            return True, f"crash, signal {-result.returncode}"
        failed = FAILED.search(result.stdout)
        if result.returncode > 1 or failed is None:
            return False, f"the tests can't run: {result.stdout[-OUTPUT_CHARS:]}"
        return True, failed.group(1)


def shared_out(mutants: Sequence[Mutant], jobs: int) -> list[list[Mutant]]:
    """Return a list for each copy.

    Compiling all sources is slow, so bugs in native code share one copy. They come last in it: a
    bug after them would need another compilation.
    """
    native = [mutant for mutant in mutants if mutant.is_native]
    queues: list[list[Mutant]] = [native, *([] for _ in range(jobs - 1))]
    for mutant in mutants:
        if not mutant.is_native:
            min(queues, key=len).insert(0, mutant)
    return [queue for queue in queues if queue]


def found_in_a_copy(directory: Path, mutants: Sequence[Mutant], tier: str | None) -> int:
    """Return the number of bugs found, and print a line for each."""
    copy = Copy(directory, native=any(mutant.is_native for mutant in mutants), tier=tier)
    copy.check_tests_pass(sorted({test for mutant in mutants for test in mutant.tests}))
    found = 0
    for mutant in mutants:
        start = time.monotonic()
        is_found, what = copy.finds(mutant)
        found += is_found
        seconds = time.monotonic() - start
        print(
            f"{'found' if is_found else 'NOT FOUND':<10} {mutant.name:<40} {seconds:5.1f} s  {what}"
        )
        sys.stdout.flush()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the tests find planted bugs?")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", metavar="NAME", help="names of planted bugs")
    which.add_argument("--draw", type=int, metavar="N", help="some, the same on every machine")
    parser.add_argument("--tier", choices=TIERS, help="by the tests of one tier alone")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested at once")
    options = parser.parse_args()
    mutants = load_mutants()
    unknown = set(options.only or ()) - {mutant.name for mutant in mutants}
    if unknown or options.jobs < 1:
        parser.error(f"no planted bug {unknown}" if unknown else "--jobs must be at least 1")
    if options.only:
        mutants = [mutant for mutant in mutants if mutant.name in options.only]
    if options.draw is not None:
        if not 1 <= options.draw <= len(mutants):
            parser.error(f"--draw must be in 1..{len(mutants)}, got {options.draw}")
        mutants = random.Random(options.draw).sample(mutants, options.draw)

    with tempfile.TemporaryDirectory(prefix="aioserve-mutants-") as directory:
        queues = shared_out(mutants, options.jobs)
        places = [Path(directory, str(number)) for number in range(len(queues))]
        try:
            with ThreadPoolExecutor(len(queues)) as threads:
                tiers = [options.tier] * len(queues)
                found = sum(threads.map(found_in_a_copy, places, queues, tiers))
        except (BrokenCopyError, StaleMutantError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return 1
    print(f"found {found} of {len(mutants)}")
    return 0 if found == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
