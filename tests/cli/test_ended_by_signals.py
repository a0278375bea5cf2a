"""Remains of a command that a signal has ended: it leaves none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aioserve.cli._interrupts import cleaning_up_first
from tests.cli.command import Run
from tests.waits import block_until

ENDING = [signal.SIGTERM, signal.SIGHUP]
WAITING = """
import time
from pathlib import Path
from aioserve import SchedulingPolicy


class Waiting(SchedulingPolicy):
    def order(self, waiting, view):
        Path({notes!r}).touch()
        while True:
            time.sleep(0.05)
"""


def ended(verb: str, folder: Path, how: signal.Signals) -> tuple[int, bytes]:
    """End a command with a signal while it asks a policy; return its exit code and stderr."""
    notes = folder / "notes"
    policy = folder / "waiting.py"
    policy.write_text(WAITING.format(notes=str(notes)))
    command = [sys.executable, "-m", "aioserve", verb, "--synthetic", "bursts"]
    command += ["--num-requests", "9", "--policy", f"{policy}:Waiting"]
    command += ["--requests", str(folder / "lines.csv")]
    command += ["--rates", "1,2", "--jobs", "2"] if verb == "sweep" else []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            block_until(lambda: notes.exists() or process.poll() is not None)
            assert process.poll() is None
            assert len([*folder.glob("*.part")]) == 1
            process.send_signal(how)
            _, err = process.communicate(timeout=160)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, err


@pytest.mark.more
@pytest.mark.parametrize("how", ENDING)
@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_no_half_written_lines_are_left(verb: str, how: signal.Signals, tmp_path: Path) -> None:
    lines = tmp_path / "lines.csv"
    lines.write_text("before")
    assert ended(verb, tmp_path, how) == (128 + how, b"")
    assert lines.read_text() == "before"
    assert not [*tmp_path.glob("*.part")]


def test_what_a_kill_left_disturbs_no_later_run(aioserve_here: Run, tmp_path: Path) -> None:
    assert ended("simulate", tmp_path, signal.SIGKILL)[0] == -signal.SIGKILL
    (left,) = tmp_path.glob("*.part")
    before, lines = left.read_bytes(), tmp_path / "lines.csv"
    done = aioserve_here(
        "simulate", "--synthetic", "bursts", "--num-requests", 9, "--requests", lines
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(lines.read_text().splitlines()) == 10
    assert [*tmp_path.glob("*.part")] == [left]
    assert left.read_bytes() == before


@pytest.mark.parametrize("how", ENDING)
def test_a_program_that_handles_a_signal_goes_on_doing_so(how: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(how, lambda signum, _: heard.append(signum))
    try:
        with cleaning_up_first():
            signal.raise_signal(how)
            assert heard == [how]
        assert signal.getsignal(how) is not signal.SIG_DFL
    finally:
        signal.signal(how, before)


@pytest.mark.parametrize("how", ENDING)
def test_a_signal_that_is_ignored_stays_so(how: signal.Signals) -> None:
    before = signal.signal(how, signal.SIG_IGN)
    try:
        with cleaning_up_first():
            signal.raise_signal(how)
            assert signal.getsignal(how) is signal.SIG_IGN
        assert signal.getsignal(how) is signal.SIG_IGN
    finally:
        signal.signal(how, before)


@pytest.mark.parametrize("how", ENDING)
def test_signals_are_afterwards_what_they_were(how: signal.Signals) -> None:
    before = signal.signal(how, signal.SIG_DFL)
    try:
        with cleaning_up_first():
            assert signal.getsignal(how) is not signal.SIG_DFL
        assert signal.getsignal(how) is signal.SIG_DFL
        with pytest.raises(ZeroDivisionError), cleaning_up_first():
            raise ZeroDivisionError
        assert signal.getsignal(how) is signal.SIG_DFL
    finally:
        signal.signal(how, before)


def test_another_thread_than_the_first_handles_none() -> None:
    seen: list[object] = []

    def run() -> None:
        with cleaning_up_first():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("times", "cleaned"), [(1, True), (2, True), (3, False)])
def test_a_second_signal_lets_the_cleaning_go_on_and_a_third_ends_it(
    times: int, cleaned: bool
) -> None:
    program = f"""
import contextlib, os, signal
from aioserve.cli._interrupts import Ended, cleaning_up_first

with contextlib.suppress(Ended), cleaning_up_first():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for _ in range({times - 1}):
            os.kill(os.getpid(), signal.SIGTERM)
        print("cleaned", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=200)
    assert done.stdout == (b"cleaned\n" if cleaned else b"")
    assert done.returncode == (0 if cleaned else -signal.SIGTERM)


AT_THE_END = """
import os, signal, sys


class AtTheEnd:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGINT):
        kill(pid, signum)


sys.modules["at_the_end"] = AtTheEnd()  # dropped when Python has given up its handlers
sys.argv = ["aioserve", "--version"]
from aioserve_main import main

main()
"""


def test_ctrl_c_behind_the_last_line_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith(b"aioserve ")
