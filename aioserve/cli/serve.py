"""`aioserve serve`: a model behind HTTP, until a signal stops it.

Settings come from flags, environment variables and a TOML file. The first SIGTERM or Ctrl-C drains,
the second ends at once. Only this command handles signals; neither the app nor the engine does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from aioserve.arguments import counted
from aioserve.cli._engine import frozen_heap, open_engine
from aioserve.cli._flags import setting_flags, takes_flags
from aioserve.cli._interrupts import leaving_at_once
from aioserve.cli._log_writer import LineHandler, LogWriter
from aioserve.cli._models import check_model
from aioserve.cli._settings import Setting, gather, made, settings_of, shown_settings
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve_main import leave_at_once

try:
    from aioserve.server import ServerSettings, create_app, tracing
    from aioserve.server.listening import Listening, bound, check_reach, check_tls, url_of
    from aioserve.server.request_checks import checks_of
    from aioserve.server.running import new_event_loop, serve_app
    from aioserve.server.step_log.trace import check_trace_file
except ModuleNotFoundError as _missing:
    raise ConfigError(
        f"aioserve serve needs {_missing.name}: pip install 'aioserve[server]'"
    ) from _missing

if TYPE_CHECKING:
    from aioserve import Engine

__all__ = ["SETTINGS", "Keys", "keys_of", "serve"]

MAX_FILE_BYTES = 2**20
NAMED = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})=(?P<key>.*[^=].*)")
"""Pattern of a name and its key. The key has more than the signs that pad a key in base64."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Model and policy of a server."""

    model: str = "pyhelp"
    """A model directory, an embedded model, random:30m, or a hub id, which is downloaded unless it
    is in the local cache.
    """
    policy: str = "fcfs"
    """Scheduling policy, with options if you like: NAME:OPTION=VALUE,OPTION=VALUE. Or a class of
    yours: FILE.py:CLASS.
    """
    trace: str | None = None
    """File to write each step into, in Chrome's trace format, which Perfetto opens."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the clients that the server answers."""

    api_key: Sequence[str] = ()
    """Key that requests must come with, KEY or NAME=KEY; logs show the name. May be given several
    times. Other users of the machine see it in the list of processes.
    """
    api_key_file: str | None = None
    """File with more keys, one a line. Lines that begin with # are comments."""


_WHAT = settings_of("engine", Served, arguments=("model",))
_ENGINE = settings_of("engine", EngineConfig)
_LISTENING = settings_of("server", Listening)
_KEYS = settings_of("server", Keys, secrets=("api_key",))
_SERVER = settings_of("server", ServerSettings, leave_out=("api_keys",))
SETTINGS: tuple[Setting, ...] = (*_WHAT, *_ENGINE, *_LISTENING, *_KEYS, *_SERVER)
"""All settings."""


def serve(
    model: str | None = None,
    /,
    *,
    config: str | None = None,
    show_config: Annotated[bool, Parameter(negative=())] = False,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, with the APIs that clients of OpenAI know.

    Args:

        model: A model directory, a GGUF file, an embedded model (pyhelp), random:30m, or a hub id,
            which is downloaded unless it is in the local cache.
        config: A TOML file with the tables [engine] and [server]; AIOSERVE_CONFIG names one too.
        show_config: Print each setting and its origin, and serve nothing.
    """
    if model is not None:
        flags["model"] = model
    environment = dict(os.environ)
    file = config if config is not None else environment.get("AIOSERVE_CONFIG") or None
    values = gather(SETTINGS, flags=flags, environment=environment, file=file)
    listening = made(Listening, values, _LISTENING)
    engine = made(EngineConfig, values, _ENGINE)
    keys = keys_of(made(Keys, values, _KEYS))
    server = made(ServerSettings, values, _SERVER)
    # Clients may also call the server by the name that it listens at.
    hosts = dict.fromkeys([*server.allowed_hosts, *listening.names])
    server = msgspec.structs.replace(server, api_keys=keys, allowed_hosts=tuple(hosts))
    check_reach(listening, has_keys=bool(keys))
    check_tls(listening)
    checks_of(server)
    what = made(Served, values, _WHAT)
    if what.trace is not None:
        check_trace_file(what.trace)
    if show_config:
        _check_engine(what.model, what.policy, engine)
        print(shown_settings(SETTINGS, values), end="")
        return
    with (
        # Only until it serves. A container's first process ignores signals without a handler.
        leaving_at_once(signal.SIGTERM),
        bound(listening) as sockets,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(Serving(what, engine, server, listening, sockets).run())


def _check_engine(model: str, policy: str, config: EngineConfig) -> None:
    """Raise what an engine would for these before it reads the model's files.

    The file of a policy or a drafter isn't run.
    """
    check_model(model)
    with leaving_at_once():
        from aioserve import Engine
        from aioserve.plugins import PluginRegistry
        from aioserve.plugins.files import DRAFTER, POLICY, names_file
    Engine(model, policy=policy, **msgspec.structs.asdict(config))
    registry = PluginRegistry()
    registry.check_selected()
    if not names_file(policy, POLICY):
        registry.policy(policy)
    registry.eviction(config.eviction)
    registry.output_parsers(config.tool_parser, config.reasoning_parser)
    if (speculation := config.speculation) and not names_file(speculation.drafter, DRAFTER):
        registry.drafter(speculation.drafter)


_GROUPS = {
    "Listening and keys": (*_LISTENING, *_KEYS),
    "Limits of the server": _SERVER,
    "Engine": (*_WHAT[1:], *_ENGINE),
}
takes_flags(serve, setting_flags(_GROUPS))


def keys_of(keys: Keys) -> dict[str, str]:
    """Return all keys, by their names. Nameless ones are key-1, key-2 and so on, by their places.

    Raises `ConfigError`, which shows no key, for names that are given twice. Also for a file that
    can't be read or has no key.
    """
    found: dict[str, str] = {}
    for place, entry in enumerate([*keys.api_key, *_lines(keys.api_key_file)], 1):
        named = NAMED.fullmatch(entry)
        name, key = (f"key-{place}", entry) if named is None else named.groups()
        if name in found:
            raise ConfigError(f"api_key: two keys have the name {name}", argument="api_key")
        found[name] = key
    return found


def _lines(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        lines = [line.strip() for line in data.decode().splitlines()]
    except (OSError, ValueError) as error:
        why = "it isn't text in UTF-8" if isinstance(error, UnicodeError) else error
        why = getattr(error, "strerror", None) or why
        raise ConfigError(
            f"api_key_file: {file} can't be read: {why}", argument="api_key_file", value=file
        ) from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found or len(data) > MAX_FILE_BYTES:
        why = "no key" if not found else f"more than {MAX_FILE_BYTES} bytes"
        raise ConfigError(f"api_key_file: {file} has {why}", argument="api_key_file", value=file)
    return found


class Serving:
    """One run of a server. `sockets` are bound, and belong to the caller."""

    def __init__(
        self,
        what: Served,
        engine: EngineConfig,
        settings: ServerSettings,
        listening: Listening,
        sockets: list[socket.socket],
    ) -> None:
        self._what = what
        self._config = engine
        self._settings = settings
        self._listening = listening
        self._sockets = sockets
        self._stop = asyncio.Event()
        self._log: LogWriter

    async def run(self) -> None:
        options = msgspec.structs.asdict(self._config)
        async with open_engine(self._what.model, policy=self._what.policy, **options) as engine:
            app = create_app(engine, self._settings)
            name = app.state.app_state.model_names[0]
            paths = {getattr(route, "path", None) for route in app.routes}
            with _logging() as self._log, self._stopping_by_signals(), frozen_heap():
                async with self._tracing(engine):
                    ended = await serve_app(
                        app,
                        self._sockets,
                        self._listening,
                        stop=self._stop,
                        on_ready=lambda: self._say_ready(engine, paths, name),
                        on_drain=lambda: self._say_draining(engine),
                    )
                late = (
                    f"; {counted(ended, 'request was', 'requests were')} ended by --drain-seconds"
                    if ended
                    else ""
                )
                self._say(f"drained{late}")

    def _tracing(self, engine: Engine) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._what.trace is None else tracing(engine, self._what.trace)

    @contextmanager
    def _stopping_by_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        stopping = (signal.SIGTERM, signal.SIGINT)

        def stop() -> None:
            # From here on, ending doesn't need the loop, which may be what hangs.
            for signum in stopping:
                loop.remove_signal_handler(signum)
                signal.signal(signum, self._leave_at_once)
            self._stop.set()

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
        self._say(f"{self._what.model} is served at {at}{page}")
        if engine.has_tokenizer and not engine.has_chat_template:
            self._say(
                f"{self._what.model} has no chat template: texts are completed, and messages are "
                "refused. --chat-template FILE gives it one"
            )
        self._say(f"try: {self._first_curl(engine, url, paths, name)}")

    def _say(self, text: str) -> None:
        self._log.put(f"aioserve: {text}")

    def _say_draining(self, engine: Engine) -> None:
        stats = engine.stats()
        self._say(
            f"draining for at most {self._listening.drain_seconds:g} s: "
            f"{stats.num_running} running, {stats.num_waiting} waiting; "
            "a second signal ends at once"
        )

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


@contextmanager
def _logging() -> Iterator[LogWriter]:
    """Log warnings and errors to stderr, and the lines of calls unchanged."""
    writer = LogWriter()
    plain, access = LineHandler(writer), LineHandler(writer)
    plain.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("aioserve.access")
    before = logger.level, logger.propagate
    logging.root.addHandler(plain)
    logger.addHandler(access)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield writer
    finally:
        logging.root.removeHandler(plain)
        logger.removeHandler(access)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        writer.close()
