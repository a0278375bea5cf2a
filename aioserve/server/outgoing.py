"""Sending half of a connection, which ends however its peer behaves.

    write ──► buffer ──► kernel ──► a peer that reads
                │
                └─ nothing has left it for `stall_seconds`: the connection is aborted

    close while a request is still arriving ──► half closed: received bytes are thrown away,
                                                up to a limit in bytes and seconds ──► closed

An answer goes into the transport's buffer, and uvicorn waits until that has drained. A peer that
reads nothing would hold the answer, its call and its socket for ever. Closing a socket with unread
bytes resets the connection. A client that is still sending would see the reset in place of the
answer that says why its request is refused.

Knows transports, and nothing of HTTP.
"""

from __future__ import annotations

import fcntl
import sys
import termios
from asyncio import AbstractEventLoop, TimerHandle, Transport
from typing import Any

__all__ = ["LINGER_BYTES", "LINGER_SECONDS", "Outgoing"]

LINGER_SECONDS = 5.0
"""Seconds that a client may continue to send a refused request."""
LINGER_BYTES = 16 * 2**20
"""Most bytes of a refused request that are still read, and thrown away. Many clients send all of a
body before they read the answer. A body refused for its length has more than 2 MiB: with a limit of
1 MiB, these clients would never see why."""


class Outgoing(Transport):
    """Transport around another, whose protocol reports received bytes and the end of the
    connection."""

    def __init__(
        self, transport: Transport, loop: AbstractEventLoop, *, stall_seconds: float
    ) -> None:
        super().__init__()
        self._transport = transport
        for same in ("abort", "pause_reading", "resume_reading", "get_write_buffer_size"):
            setattr(self, same, getattr(transport, same))
        self._loop = loop
        self._stall_seconds = stall_seconds
        self._written_bytes = 0
        self._taken_bytes = 0
        """Bytes that the peer had taken at the last check."""
        self._watching: TimerHandle | None = None
        self._lingering: TimerHandle | None = None
        self._dropped_bytes = 0
        self.lingers: bool = False
        """True if `close` waits for a client that is still sending."""

    def write(self, data: Any) -> None:
        if self._lingering is not None:
            return  # the answer is complete, and this half is closed
        self._written_bytes += len(data)
        self._transport.write(data)
        self._watch()

    def close(self) -> None:
        if self.lingers and self._lingering is None and not self._transport.is_closing():
            try:
                if self._transport.can_write_eof():
                    self._transport.write_eof()
            except OSError:  # the peer has gone
                self._transport.abort()
                return
            self._transport.resume_reading()
            self._lingering = self._loop.call_later(LINGER_SECONDS, self._transport.close)
        else:
            self._transport.close()
        self._watch()

    def drops(self, num_bytes: int) -> bool:
        """Return true if these received bytes are to be dropped, and count them."""
        if self._lingering is None:
            return False
        self._dropped_bytes += num_bytes
        if self._dropped_bytes > LINGER_BYTES:
            self._transport.close()
        return True

    def lost(self) -> None:
        """Cancel the timers: the connection is gone."""
        for timer in (self._watching, self._lingering):
            if timer is not None:
                timer.cancel()

    def _watch(self) -> None:
        if self._watching is None and self._transport.get_write_buffer_size():
            self._taken_bytes = self._written_bytes - self._untaken_bytes()
            self._watching = self._loop.call_later(self._stall_seconds, self._check)

    def _check(self) -> None:
        self._watching = None
        waits = self._transport.get_write_buffer_size() > 0
        if waits and self._written_bytes - self._untaken_bytes() <= self._taken_bytes:
            self._transport.abort()
        else:
            self._watch()

    def _untaken_bytes(self) -> int:
        """Bytes that the peer hasn't taken, as far as is known.

        The system takes more from the buffer only when much of its own is free. A peer that reads
        slowly shows only in the system's own queue.
        """
        untaken, sock = self._transport.get_write_buffer_size(), self.get_extra_info("socket")
        if sock is None or sys.platform != "linux":
            return untaken
        try:
            queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # it is closed, or of a kind that doesn't tell
            return untaken
        return untaken + int.from_bytes(queued, sys.byteorder, signed=True)

    def is_closing(self) -> bool:
        return self._lingering is not None or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
