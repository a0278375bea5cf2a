"""Threads that an interpreter waits for when it exits, but not for ever.

A thread that returns from compiled code once the interpreter has gone is unwound through frames
that don't expect it, and the process is aborted (Python before 3.14). So whoever closed no engine
still has its threads ended before the interpreter begins to end.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

__all__ = ["start_daemon"]


def start_daemon(
    name: str, run: Callable[[], None], end: Callable[[], object], *, exit_seconds: float
) -> threading.Thread:
    """Start a thread for `run`, which returns soon after `end` was called. An interpreter that
    exits waits for it up to `exit_seconds`. Raises `RuntimeError` if no thread is to be had."""
    exiting = False

    def end_at_exit() -> None:
        nonlocal exiting
        exiting = True
        end()
        thread.join(exit_seconds)

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
