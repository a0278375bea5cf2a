"""Wakes an event loop from a thread that has more to do, without giving that thread's turn away.

`call_soon_threadsafe` writes to a socket, and Python lets go of the interpreter's lock for that.
The loop's thread, just woken, takes it and keeps it for all that it has to do, while the other
thread, which may be about to start the next step, waits. A `Waker` writes with the lock held: the
loop gets it when the thread next lets go of it, in compiled code for example.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable

__all__ = ["Waker"]

# A function of a PyDLL is called with the interpreter's lock held.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class Waker:
    """Calls `woken` on `loop` soon after `wake`, once for wakes that come close together.

    Made on the loop's thread. The loop holds it, and with it `woken`, until `close`. A loop that
    watches no files, such as a simulated one, is woken by `call_soon_threadsafe`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, woken: Callable[[], None]) -> None:
        self._loop = loop
        self._woken = woken
        self._file: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            loop.add_reader(self._file, self._read)
        except NotImplementedError:
            os.close(self._file)
            self._file = None

    def wake(self) -> None:
        """From any thread, until `close`. Of a loop that is closed nothing is heard."""
        if self._file is not None:
            _eventfd_write(self._file, 1)
        else:
            self._call_soon(self._woken)

    def _read(self) -> None:
        if self._file is not None:
            os.eventfd_read(self._file)
        self._woken()

    def close_soon(self) -> None:
        """From any thread, after the last wake: `close` on the loop."""
        if not self._call_soon(self.close):
            self._close_file()

    def close(self) -> None:
        """On the loop's thread: what was to be told is told now, and then never again."""
        self._woken()
        if self._file is not None:
            self._loop.remove_reader(self._file)
            self._close_file()

    def _call_soon(self, call: Callable[[], None]) -> bool:
        """Whether the loop is open."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
            return True
        return False

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
