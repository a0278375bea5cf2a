"""Interpreter exit waits for its threads, for a while."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from aioserve.execution.exit_joined_thread import start_exit_joined_thread
from tests.waits import LIMIT_SECONDS

PROGRAM = """
import queue, time
from aioserve.execution.exit_joined_thread import start_exit_joined_thread

ends = queue.SimpleQueue()

def run():
    time.sleep({seconds})
    ends.get()
    print("done", flush=True)

end = lambda: ends.put(None)
start_exit_joined_thread("computing", run, end, exit_seconds={exit_seconds})
"""


def run(**values: float) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(**values)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout + done.stderr


def test_what_a_thread_has_begun_is_done_before_the_interpreter_ends() -> None:
    assert run(seconds=0.5, exit_seconds=LIMIT_SECONDS) == "done\n"


def test_a_thread_that_does_not_end_holds_nobody_up_for_long() -> None:
    said = run(seconds=2 * LIMIT_SECONDS, exit_seconds=0.1)
    assert said.startswith(
        "the process exits, and its thread computing is still at work after 0.1 s"
    )
    assert len(said.splitlines()) == 1


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_while_a_thread_is_waited_for_ends_the_process_without_a_traceback() -> None:
    program = PROGRAM.format(seconds=2 * LIMIT_SECONDS, exit_seconds=LIMIT_SECONDS)
    program += "import atexit\natexit.register(print, 'exits', flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "exits\n"
        time.sleep(0.5)  # until it waits
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == -signal.SIGINT
    assert said + complaints == ""


def test_a_thread_that_has_ended_is_forgotten() -> None:
    class Ends(threading.Event):
        """Can be weakly referenced."""

    ends = Ends()
    forgotten = weakref.ref(ends)
    thread = start_exit_joined_thread("short", lambda: time.sleep(0.01), ends.set, exit_seconds=1)
    thread.join()
    del ends, thread
    gc.collect()
    assert forgotten() is None
