"""The signals that end a process, heard although the tests were started with them ignored.

A shell in the background, `nohup` and many runners of jobs ignore some. A process that is started
then ignores them too, and a test that sends it one waits for nothing. A handler isn't handed down:
what is started begins with the default.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["ENDING", "heard_signals"]

ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def heard_signals() -> Iterator[None]:
    """Replaces each ignored signal by a handler that does nothing, until the block ends: this
    process goes on when one comes, as before."""
    ignored = [number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
