"""One request at a time on each connection: how uvicorn is told to speak HTTP/1.1.

A client may send a request while an earlier one is being answered. uvicorn then stops reading from
the connection until it has answered, and so doesn't see its client leave: what was asked for would
be computed to its end for nobody. No client in use does this, so such a connection is closed, which
ends what it asked for.

And a connection on which no request begins, or one that doesn't get past its headers, would stay
open for as long as its client likes, until no other finds room. It is closed, too.
"""

from __future__ import annotations

from asyncio import Protocol, TimerHandle, Transport

__all__ = ["http_protocol"]

HEADERS_SECONDS = 60.0
"""From when a connection is made, or the next request begins, until its headers are there."""


def http_protocol() -> type[Protocol] | str:
    """What `uvicorn.Config` takes as `http`. Without httptools, h11, which does answer one request
    after the other, and sees that a client has left when it next writes to it."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class OneAtATime(HttpToolsProtocol):
        _overdue: TimerHandle | None = None

        def connection_made(self, transport: Transport) -> None:
            super().connection_made(transport)
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self._await_headers()
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self._await_no_headers()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._await_no_headers()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            if self._overdue is None:
                self._overdue = self.loop.call_later(HEADERS_SECONDS, self.transport.abort)

        def _await_no_headers(self) -> None:
            if self._overdue is not None:
                self._overdue.cancel()
                self._overdue = None

        def on_message_begin(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()
                raise ConnectionAbortedError("a request came while one was being answered")
            super().on_message_begin()

    return OneAtATime
