"""Processes of `aioserve sweep`: none outlives the first one, and the death of one is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waits import block_until

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
"""Exit code of a process that ends itself, and Python's code for one that is killed."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def workers_in(group: int) -> list[int]:
    """Live worker processes of a group, which were spawned for runs."""
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            in_group = int(status.read_text().rpartition(")")[2].split()[2]) == group
            if in_group and "spawn_main" in (status.parent / "cmdline").read_text():
                found.append(int(status.parent.name))
        except OSError:  # gone
            continue
    return found


NOTING = """
import os, time
from pathlib import Path
from aioserve import SchedulingPolicy

NOTES = Path({notes!r})


class Noting(SchedulingPolicy):
    def __init__(self) -> None:
        with NOTES.open("a") as notes:
            notes.write(f"{{os.getpid()}}\\n")
        self.waits = len(NOTES.read_text().split()) > {waits}

    def order(self, waiting, view):
        while self.waits:
            time.sleep(0.1)
        return waiting
"""


def refining(folder: Path, *, waits: int = 1000) -> tuple[list[str], Path]:
    """Command of a sweep, and a file with the process of each policy that was made.

    The first round has four runs, and the others have two. After `waits` policies, runs never end.
    """
    notes, policy = folder / "notes", folder / "noting.py"
    policy.write_text(NOTING.format(notes=str(notes), waits=waits))
    command = [sys.executable, "-m", "aioserve", "sweep", "--synthetic", "bursts"]
    command += ["--num-requests", "20", "--max-num-seqs", "4", "--policy", f"{policy}:Noting"]
    command += ["--rates", "1,100", "--seeds", "2", "--slo", "ttft_p50=1", "--refine", "3"]
    return [*command, "--jobs", "3"], notes


def noted(notes: Path) -> list[int]:
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []


@contextmanager
def endless_sweep(
    folder: Path, *, waits: int = 1, made: int = 4
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a sweep in its own process group, and wait until it has `made` this many policies.

    The first policy belongs to its first process. After `waits` policies, runs never end.
    """
    command, notes = refining(folder, waits=waits)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            block_until(lambda: len(noted(notes)) == made)
            yield process
        finally:
            if process.poll() is None or workers_in(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.more
def test_processes_are_kept_from_round_to_round(tmp_path: Path) -> None:
    command, notes = refining(tmp_path)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, b"")
    runs = [number for number in noted(notes) if number != process.pid]
    assert len(runs) == 4 + 3 * 2
    assert len(set(runs)) <= 3


@pytest.mark.more
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_none_outlives_the_first_one_in_a_later_round_the_idle_one_neither(
    how: signal.Signals, tmp_path: Path
) -> None:
    with endless_sweep(tmp_path, waits=5, made=7) as process:
        assert len(workers_in(process.pid)) == 3
        process.send_signal(how)
        assert process.wait(timeout=160) == EXIT_CODES[how]
        block_until(lambda: not workers_in(process.pid))


def test_ctrl_c_ends_all_processes_with_nothing_said(tmp_path: Path) -> None:
    with endless_sweep(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)  # like a terminal: to all of them
        out, err = process.communicate(timeout=160)
        assert (process.returncode, out, err) == (130, b"", b"")
        assert not workers_in(process.pid)


@pytest.mark.more
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_first_one(how: signal.Signals, tmp_path: Path) -> None:
    with endless_sweep(tmp_path) as process:
        process.send_signal(how)
        assert process.wait(timeout=160) == EXIT_CODES[how]
        block_until(lambda: not workers_in(process.pid))


@pytest.mark.more
def test_a_process_that_is_killed_ends_the_sweep_with_a_line(tmp_path: Path) -> None:
    with endless_sweep(tmp_path) as process:
        os.kill(workers_in(process.pid)[0], signal.SIGKILL)
        out, err = process.communicate(timeout=160)
        assert (process.returncode, out) == (2, b"")
        assert err.startswith(b"aioserve: jobs: a process ended before its run was done")
        assert err.count(b"\n") == 1
        assert not workers_in(process.pid)
