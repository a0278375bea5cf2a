"""One request at a time on each connection: how uvicorn is told to speak HTTP/1.1.

A client may send a request while an earlier one is being answered. uvicorn then stops reading from
the connection until it has answered, and so doesn't see its client leave: what was asked for would
be computed to its end for nobody. No client in use does this, so such a connection is closed, which
ends what it asked for.
"""

from __future__ import annotations

from asyncio import Protocol

__all__ = ["http_protocol"]


def http_protocol() -> type[Protocol] | str:
    """What `uvicorn.Config` takes as `http`. Without httptools, h11, which does answer one request
    after the other, and sees that a client has left when it next writes to it."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class OneAtATime(HttpToolsProtocol):
        def on_message_begin(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()
                raise ConnectionAbortedError("a request came while one was being answered")
            super().on_message_begin()

    return OneAtATime
