"""One model behind HTTP, from its start to its drain: signals, and what is said on stderr.

The first SIGTERM or Ctrl-C drains, the second ends at once. Handlers of signals are the command's;
neither the app nor the engine has any.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from aioserve.arguments import counted
from aioserve.cli._engine import chosen_policy, open_engine
from aioserve.cli._heap import frozen_heap
from aioserve.cli._interrupts import leave_at_once
from aioserve.config import EngineConfig
from aioserve.server import ServerSettings, create_app, tracing
from aioserve.server.listening import Listening, url_of
from aioserve.server.running import serve_app

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = ["Served", "Serving"]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and by which policy."""

    model: str = "pyhelp"
    """A model directory, an embedded model, random:30m, or a hub id, which is downloaded where it
    isn't in the local cache."""
    policy: str = "fcfs"
    """The scheduling policy, or one with options: NAME:OPTION=VALUE,OPTION=VALUE; or a class of
    yours as FILE.py:CLASS."""
    trace: str | None = None
    """A file to write each step into, in Chrome's trace format, which Perfetto opens."""


class Serving:
    """`sockets` are bound, and belong to the caller. Raises as `chosen_policy`."""

    def __init__(
        self,
        what: Served,
        engine: EngineConfig,
        settings: ServerSettings,
        listening: Listening,
        sockets: list[socket.socket],
    ) -> None:
        self._what = what
        self._policy = chosen_policy(what.policy)
        self._config = engine
        self._settings = settings
        self._listening = listening
        self._sockets = sockets
        self._stop = asyncio.Event()

    async def run(self) -> None:
        options = msgspec.structs.asdict(self._config)
        async with open_engine(self._what.model, policy=self._policy, **options) as engine:
            app = create_app(engine, self._settings)
            name = app.state.app_state.model_names[0]
            paths = {getattr(route, "path", None) for route in app.routes}
            with _logging(), self._stopping_by_signals(engine), frozen_heap():
                async with self._tracing(engine):
                    ended = await serve_app(
                        app,
                        self._sockets,
                        self._listening,
                        stop=self._stop,
                        on_ready=lambda: self._say_ready(engine, paths, name),
                    )
        late = (
            f"; {counted(ended, 'request was', 'requests were')} ended by --drain-seconds"
            if ended
            else ""
        )
        _say(f"drained{late}")

    def _tracing(self, engine: Engine) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._what.trace is None else tracing(engine, self._what.trace)

    @contextmanager
    def _stopping_by_signals(self, engine: Engine) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        stopping = (signal.SIGTERM, signal.SIGINT)

        def stop() -> None:
            # From here on the loop isn't needed to end: it may be what hangs.
            for signum in stopping:
                loop.remove_signal_handler(signum)
                signal.signal(signum, self._leave_at_once)
            self._stop.set()
            stats = engine.stats()
            _say(
                f"draining for at most {self._listening.drain_seconds:g} s: "
                f"{stats.num_running} running, {stats.num_waiting} waiting; "
                "a second signal ends at once"
            )

        for signum in stopping:
            loop.add_signal_handler(signum, stop)
        try:
            yield
        finally:
            if not self._stop.is_set():
                for signum in stopping:
                    loop.remove_signal_handler(signum)

    def _leave_at_once(self, signum: int, *_: object) -> None:
        if self._listening.uds is not None:
            os.unlink(self._listening.uds)
        leave_at_once(signum)

    def _say_ready(self, engine: Engine, paths: set[str | None], name: str) -> None:
        url = url_of(self._listening, self._sockets)
        at = url if self._listening.uds is None else f"{url} by {self._listening.uds}"
        page = f"; a page to try it: {url}/" if "/" in paths else ""
        _say(f"{self._what.model} is served at {at}{page}")
        _say(f"try: {self._first_curl(engine, url, paths, name)}")

    def _first_curl(self, engine: Engine, url: str, paths: set[str | None], name: str) -> str:
        about: dict[str, Any] = {"model": name}
        path = "/v1/completions"
        if engine.has_chat_template and "/v1/chat/completions" in paths:
            path = "/v1/chat/completions"
            about["messages"] = [{"role": "user", "content": "What does json.dumps do?"}]
        else:
            about["prompt"] = "import os\n" if engine.has_tokenizer else [1, 2, 3]
        words = ["curl", url + path]
        if self._listening.uds is not None:
            words += ["--unix-socket", self._listening.uds]
        if self._listening.tls_cert_file is not None:
            words += ["--cacert", self._listening.tls_cert_file]
        words += ["-H", "content-type: application/json"]
        line = shlex.join([*words, "-d", json.dumps(about)])
        return line + ' -H "authorization: Bearer $KEY"' if self._settings.api_keys else line


def _say(text: str) -> None:
    """A server goes on when its output is no longer read."""
    with suppress(OSError):
        print(f"aioserve: {text}", file=sys.stderr, flush=True)


@contextmanager
def _logging() -> Iterator[None]:
    """Warnings and errors go to stderr, and the lines of calls as they are."""
    plain, access = logging.StreamHandler(), logging.StreamHandler()
    plain.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("aioserve.access")
    before = logger.level, logger.propagate
    logging.root.addHandler(plain)
    logger.addHandler(access)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logging.root.removeHandler(plain)
        logger.removeHandler(access)
        logger.setLevel(before[0])
        logger.propagate = before[1]
