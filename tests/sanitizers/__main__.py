"""Runs tests with a native module that checks itself.

    python -m tests.sanitizers [address] [thread] [--tests ...]

`address` is AddressSanitizer and UndefinedBehaviorSanitizer. It runs the tests of pages, prefix
tree, drafters, operations and reading weights. `thread` is ThreadSanitizer. It runs the tests that
use the thread pool or call from several threads.

Each module is compiled in its own folder in `build/sanitize/`; the installed one stays as it is.
The first finding ends its process, and so fails its test.

Before the tests, planted mistakes must be reported. So a module without the sanitizer, or one that
isn't loaded, ends the run.

Three things are not looked for:

- Leaks, since Python keeps much of its memory until the end.
- Races inside torch and Python, which are compiled without ThreadSanitizer.
- Partial vectors that AVX loads and stores under a mask. AddressSanitizer sees only those of the
  portable kernels.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTUP = Path(__file__).with_name("startup")
TEST_SECONDS = 900
CONTROL_SECONDS = 120

READ_PAST_THE_END = """
import torch
from aioserve.ops import backend_named
from aioserve.ops.backend import RMSNorm
native = backend_named("native")
x = torch.ones(100, 512)
x.untyped_storage().resize_(4096)
native.rms_norm(x, RMSNorm(torch.ones(512), 1e-6))
"""
MISALIGNED = """
import torch
from aioserve.ops import backend_named
ids = torch.frombuffer(bytearray(81), dtype=torch.int64, offset=1)
backend_named("native").linear(torch.ones(3, 4)).rows(ids)
"""
TWO_WRITERS = """
import threading
import torch
from aioserve.ops import backend_named
from aioserve.ops.backend import RMSNorm
native = backend_named("native")
shared, x, weight = torch.zeros(4000, 512), torch.ones(4000, 512), torch.ones(512)
def write():
    native.rms_norm(x, RMSNorm(weight, 1e-6), shared)
threads = [threading.Thread(target=write) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@dataclass(frozen=True, slots=True)
class Sanitizer:
    flags: str
    """Value of `-fsanitize=`."""
    libraries: tuple[str, ...]
    """Libraries to load before all others, so that Python's and torch's memory and threads are
    known too."""
    environment: dict[str, str]
    controls: dict[str, str]
    """Programs, by what must be reported of each."""
    tests: tuple[str, ...]


SANITIZERS = {
    "address": Sanitizer(
        flags="address,undefined",
        libraries=("libasan", "libubsan", "libstdc++"),
        environment={
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        controls={
            "AddressSanitizer: heap-buffer-overflow": READ_PAST_THE_END,
            "runtime error: load of misaligned address": MISALIGNED,
        },
        tests=(
            "tests/drafting",
            "tests/kv",
            "tests/models/test_reading.py",
            *("tests/ops", "--ignore=tests/ops/gpu"),  # compilers, which don't stand it
            "tests/properties/test_drafters.py",
            "tests/properties/test_page_pool.py",
            "tests/properties/test_prefix_tree.py",
        ),
    ),
    "thread": Sanitizer(
        flags="thread",
        libraries=("libtsan", "libstdc++"),
        environment={"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1"},
        controls={"ThreadSanitizer: data race": TWO_WRITERS},
        # ThreadSanitizer refuses threads in the child of a process that had some.
        tests=(
            *("tests/ops", "tests/models/test_reading.py"),
            *("-k", "(thread or not_mix or at_once) and not forked"),
        ),
    ),
}


class SanitizerError(Exception):
    """The module can't be built, or doesn't find what it must."""


def build(name: str) -> Path:
    """Compile what has changed; the path of the module."""
    directory = ROOT / "build" / "sanitize" / name
    nanobind = _output(sys.executable, "-m", "nanobind", "--cmake_dir").strip()
    _output(
        *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(directory)),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"),
        *("-DCMAKE_BUILD_TYPE=Debug", f"-DAIOSERVE_SANITIZE={SANITIZERS[name].flags}"),
    )
    _output("cmake", "--build", str(directory))
    (module,) = directory.glob("_native.*.so")
    return module


def environment(sanitizer: Sanitizer, module: Path) -> dict[str, str]:
    """Return environment variables that make Python load the module with its sanitizer's
    libraries."""
    linked = [line.split() for line in _output("ldd", str(module)).splitlines()]
    paths = [words[2] for words in linked if words[1:2] == ["=>"]]
    preload = [p for lib in sanitizer.libraries for p in paths if Path(p).name.startswith(lib)]
    if len(preload) != len(sanitizer.libraries):
        raise SanitizerError(
            f"{module} must be linked to {sanitizer.libraries}, but only to {preload}; set CXX=g++"
        )
    return {
        **os.environ,
        **sanitizer.environment,
        "AIOSERVE_SANITIZED": str(module),
        "LD_PRELOAD": " ".join(preload),
        "PYTHONPATH": str(STARTUP),
    }


def check_controls(sanitizer: Sanitizer, variables: dict[str, str]) -> None:
    for report, program in sanitizer.controls.items():
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=CONTROL_SECONDS,
        )
        if done.returncode == 0 or report not in done.stderr:
            raise SanitizerError(f"not reported: {report}\n{program}\n{done.stderr[-2000:]}")
        print(f"reports what was planted: {report}", flush=True)


def run_tests(sanitizer: Sanitizer, variables: dict[str, str], arguments: list[str]) -> int:
    # What a sanitizer writes before it ends the process must not be lost with it.
    options = ("-q", "--capture=sys", "-p", "no:cacheprovider", "-o", f"timeout={TEST_SECONDS}")
    command = [sys.executable, "-m", "pytest", *options, *(arguments or sanitizer.tests)]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


def _output(*command: str) -> str:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise SanitizerError(f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="sanitizer", help="default: all")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="what pytest is to run instead")
    options = parser.parse_args()
    names = options.names or list(SANITIZERS)
    if unknown := set(names) - set(SANITIZERS):
        parser.error(f"sanitizer must be one of {', '.join(SANITIZERS)}; got {unknown}")
    failed = []
    for name in names:
        sanitizer = SANITIZERS[name]
        print(f"-fsanitize={sanitizer.flags}", flush=True)
        try:
            variables = environment(sanitizer, build(name))
            check_controls(sanitizer, variables)
        except (SanitizerError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return 1
        if run_tests(sanitizer, variables, options.tests or []):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
