"""Threads that interpreter exit waits for, but not forever.

A thread may return from compiled code after the interpreter is gone. Then it is unwound through
frames that don't expect it, and the process aborts (Python before 3.14). So the threads of an
unclosed engine are ended before the interpreter begins to end. Ctrl-C meanwhile ends the process.
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
    """Start a thread for `run`, which must return soon after `end` is called.

    Interpreter exit waits for it up to `exit_seconds`. Raises `RuntimeError` if the system can't
    start a thread.
    """
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
    except RuntimeError:  # the system can't start one
        atexit.unregister(end_at_exit)
        raise
    return thread


def _interrupted() -> None:
    """End the process as an unhandled Ctrl-C does.

    An exiting interpreter would instead print a traceback of an exception, go on, and forget the
    interrupt.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)
