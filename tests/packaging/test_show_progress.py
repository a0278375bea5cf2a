"""The tool that runs pip for the Makefile says how far it is, and hides nothing that went wrong."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "show_progress"
LINES = [
    "Looking in links: /somewhere",
    "  Downloading https://pypi.example/torch-2.13.0-cp311.whl (198.3 MB)",
    "  Downloading https://pypi.example/small-1.0-py3.whl (62 kB)",
    "WARNING: the cache is disabled",
    "  [0/2] Re-checking globbed directories...",
    *(f"  [{n}/40] Building CXX object CMakeFiles/_native.dir/{n}.cpp.o" for n in range(1, 39)),
    "  /checkout/native/a.cpp:3:1: warning: unused variable",
    "  [39/40] Linking CXX static library libnanobind-static.a",
    "  [40/40] Linking CXX shared module _native.so",
    "Installing collected packages: numpy, torch, sympy",
    "Installing collected packages: aioserve",
]
COUNTS = [f"Compiling native/: {n} of 40 files." for n in (4, 8, 12, 16, 20, 24, 28, 32, 36)]
DOWNLOADING = "Downloading torch-2.13.0-cp311.whl (198.3 MB)."


def command(lines: list[str], end: str = "") -> list[str | Path]:
    """The tool, and a program in pip's place."""
    program = f"for line in {lines!r}: print(line)\n{end}"
    return [sys.executable, TOOL, sys.executable, "-c", program]


def run(lines: list[str], end: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(lines, end), capture_output=True, text=True, timeout=100)


def test_what_is_downloaded_compiled_and_unpacked_has_a_line() -> None:
    done = run(LINES)
    assert done.stdout.splitlines() == [
        DOWNLOADING,
        *COUNTS,
        "Compiled native/.",
        "Unpacking 3 packages.",
    ]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("end", "status"), [("exit(3)", 3), ("import os; os.abort()", 134)])
def test_a_command_that_fails_is_shown_whole_and_gives_its_status(end: str, status: int) -> None:
    printed = [*LINES[:9], "  a.cpp:1:1: error: expected ';'"]
    done = run(printed, f"import sys; sys.stdout.flush(); {end}")
    assert done.stderr.splitlines() == printed
    assert done.returncode == status


def test_what_a_command_writes_to_both_streams_stays_in_order() -> None:
    end = "import sys; sys.stderr.write('ERROR: no matching version\\n'); print('behind'); exit(1)"
    assert run(["before"], end).stderr == "before\nERROR: no matching version\nbehind\n"


def test_the_count_stays_in_one_line_of_a_terminal() -> None:
    shown = shown_on_terminal(command(LINES))
    assert [line.rstrip() for line in shown.split("\n")] == [
        DOWNLOADING,
        shown.split("\n")[1].rstrip(),
        "Unpacking 3 packages.",
        "",
    ]
    counts = shown.split("\n")[1].split("\r")
    assert [one.rstrip() for one in counts] == [
        *(f"Compiling native/: {n} of 40 files." for n in range(1, 39)),
        "Compiled native/.",
    ]
    assert all(len(one) <= len(after) for one, after in pairwise(counts))


def test_a_build_that_fails_leaves_the_line_of_the_count() -> None:
    shown = shown_on_terminal(command(LINES[:9], "exit(1)"))
    assert shown.split("\n")[1].rstrip(" \r").endswith("of 40 files.")
    assert shown.split("\n")[2:] == [*LINES[:9], ""]


def shown_on_terminal(tool: list[str | Path]) -> str:
    """Everything that a command writes to a terminal, with plain ends of lines."""
    main, terminal = pty.openpty()
    try:
        with subprocess.Popen(tool, stdout=terminal, stderr=terminal) as process:
            os.close(terminal)
            shown = b"".join(iter(lambda: read_from(main), b""))
        return shown.decode().replace("\r\n", "\n")
    finally:
        os.close(main)
        process.wait()


def read_from(main: int) -> bytes:
    """Return what was written. It is empty once all ends of the terminal are closed, which Linux
    calls an error."""
    try:
        return os.read(main, 4096)
    except OSError:
        return b""


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "nobody reads"])
def test_a_command_goes_on_although_nobody_hears_of_it(closed: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command(LINES, "import sys; sys.stdout.flush(); exit(3)"),
        preexec_fn=(lambda: os.close(1)) if closed else None,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    os.close(writing)
    assert done.returncode == 3
    assert done.stderr.splitlines() == LINES


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "usage: tools/show_progress COMMAND ...\n"),
        (["./none"], 127, "tools/show_progress: [Errno 2] No such file or directory: './none'\n"),
    ],
)
def test_a_command_that_is_none_is_one_line(words: list[str], status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, TOOL, *words], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (status, said)


def test_a_count_of_nothing_is_no_count() -> None:
    done = run(["  [5/0] Building CXX object a"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
