"""New random examples of each property, for a while.

    python -m tests.explore [--max-seconds 600] [--jobs 2] [--seed N] [pytest arguments]

`make test` draws the same examples on every machine. This draws others, in processes that each have
a seed: it says which examples come and in which order the files do. A process that is through is
followed by one with a new seed. The first failure ends all, and is printed with the line that
repeats it. `--seed` runs one process alone, with this seed.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parent.parent
POLL_SECONDS = 0.2


class InAnotherOrder:
    """A pytest plugin that runs only properties, in an order of files drawn by `seed`.

    It stops at `ends`, in seconds of `time.monotonic`, and says how to repeat a failure.
    """

    def __init__(self, seed: int, ends: float) -> None:
        self._seed = seed
        self._ends = ends
        self._failed = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        properties = [item for item in items if item.get_closest_marker("hypothesis")]
        files = [[*of_file] for _, of_file in groupby(properties, lambda item: item.path)]
        random.Random(self._seed).shuffle(files)
        items[:] = [item for of_file in files for item in of_file]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if time.monotonic() >= self._ends:
            pytest.exit("the time is up", returncode=int(self._failed))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = True
            print(f"\nonce more: {repeating(report.nodeid, self._seed)}")


def repeating(nodeid: str, seed: int) -> str:
    """The command that runs one test with the examples of `seed`."""
    options = f"--hypothesis-profile explore --hypothesis-seed {seed}"
    return f"{Path(sys.executable).relative_to(ROOT)} -m pytest '{nodeid}' {options}"


def run_properties(seed: int, ends: float, arguments: Sequence[str]) -> int:
    options = ("-q", "-x", "-c", "pyproject.toml", "--hypothesis-profile=explore")
    chosen = (f"--hypothesis-seed={seed}", "-m", "not alone", *arguments)
    code = pytest.main([*options, *chosen], plugins=[InAnotherOrder(seed, ends)])
    return int(code)


def run_processes(jobs: int, ends: float, arguments: Sequence[str]) -> int:
    """Exit code of the first process that failed, whose output is printed; 0 once time is up. Each
    of the `jobs` runs at least one property."""
    running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    rounds = 0
    try:
        while running or not rounds or time.monotonic() < ends:
            while len(running) < jobs and (not rounds or time.monotonic() < ends):
                running.append(_start(random.randrange(2**32), ends, arguments))
            time.sleep(POLL_SECONDS)
            for process, output in [one for one in running if one[0].poll() is not None]:
                running.remove((process, output))
                rounds += 1
                if process.returncode:
                    output.seek(0)
                    print(output.read().decode(errors="replace"))
                    return process.returncode
    finally:
        for process, _ in running:
            process.kill()
            process.wait()
    print(f"{rounds} rounds, nothing found")
    return 0


def _start(
    seed: int, ends: float, arguments: Sequence[str]
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a process that writes to a file, and return both: an unread pipe would stop it."""
    print(f"seed {seed}", flush=True)
    seconds = max(ends - time.monotonic(), 0)
    command = [sys.executable, "-m", "tests.explore", f"--seed={seed}", f"--max-seconds={seconds}"]
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its last reference
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    return process, output


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore")
    parser.add_argument("--max-seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--seed", type=int, help="of one process alone")
    options, arguments = parser.parse_known_args(words)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    ends = time.monotonic() + options.max_seconds
    if options.seed is not None:
        return run_properties(options.seed, ends, arguments)
    return run_processes(options.jobs, ends, arguments)


if __name__ == "__main__":
    sys.exit(main())
