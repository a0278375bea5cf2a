"""The end of a server that loses nothing: no new requests, and those there are get their answers.

    open ──drain──► draining: /ready says 503, new requests are refused with 503
                        │       running ones go on, until the deadline ends them with an error
                        ▼
                    every answer is sent to its end, to readers that read it by then

Installs no signal handler: whoever runs the app says when.
"""

from __future__ import annotations

import asyncio
import math

import anyio
from starlette.applications import Starlette

from aioserve.server.served import Served

__all__ = ["SEND_SECONDS", "drain"]

SEND_SECONDS = 1.0
"""How long readers may take to read the ends of answers that the deadline has ended."""


async def drain(app: Starlette, deadline_seconds: float | None = None) -> int:
    """Take no more requests, and wait until those there are have been answered. Returns how many
    the engine ended with an error after `deadline_seconds`; None waits as long as it takes. Readers
    of answers have until then too, and a second more for the ends of those that it ended.

    `app` is what `create_app` returned, wherever it is mounted. The server that runs it has to go
    on meanwhile: new requests are told that this one goes away, and `/ready` is. Raises as
    `Engine.drain` does.
    """
    served: Served = app.state.served
    clock = asyncio.get_running_loop().time
    began = clock()
    ended = await served.engine.drain(deadline_seconds)
    deadline = math.inf if deadline_seconds is None else began + deadline_seconds
    with anyio.move_on_after(max(SEND_SECONDS, deadline - clock())):
        await served.calls.wait_none()
    return ended
