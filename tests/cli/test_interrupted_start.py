"""Ctrl-C while the command still imports its modules: there is never a traceback.

The signal comes after a number of imported modules, which Python reports on stderr. Milliseconds
would depend on how busy the machine is.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "aioserve")
VERBS = [["--help"], ["plugins"], ["simulate", "--synthetic", "bursts", "--num-requests", "9"]]
IMPORTS = 700
"""Number of modules that each of them imports, about."""
IGNORING = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]


def interrupted(command: list[str], num_imports: int) -> tuple[int, bytes, str]:
    """Run a command, which runs SCRIPT, and send SIGINT after `num_imports` more imported modules.

    Returns its exit code, stdout and stderr, without the lines about imports. A command that ends
    earlier gets no signal.
    """
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if sys.platform == "linux":  # so that the command can't be far ahead of what is read
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        lines: list[str] = []
        left = None
        for raw in process.stderr:
            line = raw.decode()
            if not line.startswith("import time:"):
                lines.append(line)
            elif left is not None:
                left -= 1
            elif line.endswith("| aioserve_main\n"):
                left = num_imports
            if left == 0:
                process.send_signal(signal.SIGINT)
        out = process.stdout.read()
    assert left is not None, "the script doesn't begin with aioserve_main"
    return process.returncode, out, "".join(lines)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_an_interrupt_leaves_no_traceback_whenever_it_comes(verb: list[str]) -> None:
    draws = random.Random(verb[0])
    for num_imports in (1, 2, *(draws.randint(3, IMPORTS) for _ in range(6))):
        code, out, err = interrupted([SCRIPT, *verb], num_imports)
        assert err == "", num_imports
        # It has ended with all its output, or its end was cut off.
        assert code == 130 or (out and code in {0, -signal.SIGINT}), (num_imports, code)


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    code, out, err = interrupted([*IGNORING, SCRIPT, "--help"], 2)
    assert (code, err) == (0, "")
    assert b"simulate" in out


def test_the_module_that_the_command_begins_with_imports_next_to_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import aioserve_main; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert "aioserve_main" in modules
    assert {name for name in modules if name.startswith("aioserve")} == {"aioserve_main"}
    assert len(modules) < 30, modules


def test_the_command_and_the_module_begin_at_the_same_place() -> None:
    (point,) = metadata.entry_points(group="console_scripts", name="aioserve")
    assert point.value == "aioserve_main:main"
