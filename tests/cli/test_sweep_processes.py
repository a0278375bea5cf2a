"""Processes of `aioserve sweep`: none outlives the first one, and one that dies is told of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def workers_in(group: int) -> list[int]:
    """Processes of that group that were spawned to run things and are alive."""
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            in_group = int(status.read_text().rpartition(")")[2].split()[2]) == group
            if in_group and "spawn_main" in (status.parent / "cmdline").read_text():
                found.append(int(status.parent.name))
        except OSError:  # gone
            continue
    return found


def wait_for_workers(group: int, count: int) -> list[int]:
    deadline = time.monotonic() + 40
    while len(workers := workers_in(group)) != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return workers


@contextmanager
def long_sweep() -> Iterator[subprocess.Popen[bytes]]:
    """One in a group of its own, whose two processes have begun."""
    command = [sys.executable, "-m", "aioserve", "sweep", "--synthetic", "bursts"]
    command += ["--num-requests", "20000", "--rates", "5,6,7,8", "--jobs", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            wait_for_workers(process.pid, 2)
            yield process
        finally:
            if process.poll() is None or workers_in(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_ends_all_processes_with_nothing_said() -> None:
    with long_sweep() as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        out, err = process.communicate(timeout=40)
        assert (process.returncode, out, err) == (130, b"", b"")
        assert not workers_in(process.pid)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_first_one(how: signal.Signals) -> None:
    with long_sweep() as process:
        process.send_signal(how)
        assert process.wait(timeout=40) == -how
        wait_for_workers(process.pid, 0)


def test_a_process_that_is_killed_ends_the_sweep_with_a_line() -> None:
    with long_sweep() as process:
        os.kill(workers_in(process.pid)[0], signal.SIGKILL)
        out, err = process.communicate(timeout=40)
        assert (process.returncode, out) == (2, b"")
        assert err.startswith(b"aioserve: jobs: a process ended before its run was done")
        assert err.count(b"\n") == 1
        assert not workers_in(process.pid)
