"""Threads that an interpreter waits for when it exits, but not for ever.

A thread that returns from compiled code once the interpreter has gone is unwound through frames
that don't expect it, and the process is aborted (Python before 3.14). So a program that closed no
engine still has its threads ended before the interpreter begins to end. Ctrl-C meanwhile ends the
process.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable

__all__ = ["start_exit_joined_thread"]

logger: logging.Logger = logging.getLogger(__name__)


def start_exit_joined_thread(
    name: str, run: Callable[[], None], end: Callable[[], object], *, exit_seconds: float
) -> threading.Thread:
    """Start a thread for `run`, which returns soon after `end` was called. An interpreter that
    exits waits for it up to `exit_seconds`. Raises `RuntimeError` if no thread is to be had."""
    exiting = False

    def end_at_exit() -> None:
        nonlocal exiting
        exiting = True
        end()
        try:
            thread.join(exit_seconds)
        except KeyboardInterrupt:
            _interrupted()
        if thread.is_alive():
            logger.warning(
                "the process exits, and its thread %s is still at work after %g s: it may be "
                "aborted. Close the engine before (`async with`)",
                name,
                exit_seconds,
            )

    def run_to_the_end() -> None:
        try:
            run()
        finally:
            if not exiting:
                atexit.unregister(end_at_exit)

    thread = threading.Thread(target=run_to_the_end, name=name, daemon=True)
    atexit.register(end_at_exit)
    try:
        thread.start()
    except RuntimeError:  # the system has none to give
        atexit.unregister(end_at_exit)
        raise
    return thread


def _interrupted() -> None:
    """End the process as Ctrl-C ends one that doesn't handle it. An interpreter that exits prints a
    traceback of what is raised instead, goes on, and forgets that it was interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)
