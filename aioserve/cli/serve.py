"""`aioserve serve`: a model behind HTTP, until a signal says stop.

Settings come from flags, environment variables and a TOML file.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from aioserve.cli._flags import setting_flags, takes_flags
from aioserve.cli._interrupts import leaving_at_once
from aioserve.cli._keys import Keys, keys_of
from aioserve.cli._settings import Setting, gather, made, settings_of, shown_settings
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError

try:
    from aioserve.cli._serving import Served, Serving
    from aioserve.server import ServerSettings
    from aioserve.server.listening import Listening, bound, check_reach, check_tls
    from aioserve.server.request_checks import operators_of
    from aioserve.server.running import new_event_loop
except ModuleNotFoundError as _missing:
    raise ConfigError(
        f"aioserve serve needs {_missing.name}: pip install 'aioserve[server]'"
    ) from _missing

__all__ = ["SETTINGS", "serve"]

_WHAT = settings_of("engine", Served, arguments=("model",))
_ENGINE = settings_of("engine", EngineConfig)
_LISTENING = settings_of("server", Listening)
_KEYS = settings_of("server", Keys, secrets=("api_key",))
_SERVER = settings_of("server", ServerSettings, leave_out=("api_keys",))
SETTINGS: tuple[Setting, ...] = (*_WHAT, *_ENGINE, *_LISTENING, *_KEYS, *_SERVER)
"""All that can be given."""


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
        model: A model directory, an embedded model (pyhelp), random:30m, or a hub id, which is
            downloaded where it isn't in the local cache.
        config: A TOML file with the tables [engine] and [server]; AIOSERVE_CONFIG names one too.
        show_config: Print each setting and where it comes from, and serve nothing.
    """
    if model is not None:
        flags["model"] = model
    environment = dict(os.environ)
    file = config if config is not None else environment.get("AIOSERVE_CONFIG") or None
    values = gather(SETTINGS, flags=flags, environment=environment, file=file)
    listening = made(Listening, values, [one.name for one in _LISTENING])
    engine = made(EngineConfig, values, [one.name for one in _ENGINE])
    keys = keys_of(made(Keys, values, [one.name for one in _KEYS]))
    server = made(ServerSettings, values, [one.name for one in _SERVER])
    if show_config:
        print(shown_settings(SETTINGS, values), end="")
        return
    # Whoever calls it by the name that it listens at means it.
    hosts = dict.fromkeys([*server.allowed_hosts, *listening.names])
    server = msgspec.structs.replace(server, api_keys=keys, allowed_hosts=tuple(hosts))
    check_reach(listening, has_keys=bool(keys))
    check_tls(listening)
    operators_of(server.keys, server.operators)
    what = made(Served, values, [one.name for one in _WHAT])
    with (
        # Until it serves. A container's first process ignores what it has no handler for.
        leaving_at_once(signal.SIGTERM),
        bound(listening) as sockets,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(Serving(what, engine, server, listening, sockets).run())


_GROUPS = {
    "Listening and keys": (*_LISTENING, *_KEYS),
    "Limits of the server": _SERVER,
    "Engine": (*_WHAT[1:], *_ENGINE),
}
takes_flags(serve, setting_flags(_GROUPS))
