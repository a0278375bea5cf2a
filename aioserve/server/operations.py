"""Endpoints for operators and their machines: health, readiness, setup.

`/health` shows if the engine's steps make progress. `/ready` shows if new requests are accepted. A
draining server is healthy and not ready.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any, Literal

import msgspec

from aioserve.engine.stats import EngineStats
from aioserve.errors import EngineState
from aioserve.server.app_state import Call
from aioserve.server.bodies import NoParameters, Strict
from aioserve.server.endpoint import Answer, Endpoint, endpoint
from aioserve.server.errors import DRAINING_RETRY_SECONDS, refuse
from aioserve.server.openai.errors import OPENAI_ERRORS

__all__ = [
    "AbortOne",
    "AbortRequest",
    "Aborted",
    "Health",
    "PrefixCacheReset",
    "Readiness",
    "ServerInfo",
    "Version",
    "abort_request",
    "abort_requests",
    "health",
    "health_of",
    "ping",
    "ready",
    "reset_prefix_cache",
    "server_info",
    "version",
]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/health`, with the status 503 unless `status` is "ok"."""

    status: Literal["ok", "stalled", "failed", "closed"]
    """State of the engine. "stalled": there is work, and no step has ended for longer than the
    limit."""
    engine: EngineState
    step_age_seconds: float
    """Seconds since the last step ended, while work is pending. 0 when idle."""
    max_step_age_seconds: float
    num_running: int
    num_waiting: int
    steps_total: int


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/ready`, with the status 503 unless `status` is "ready"."""

    status: Literal["ready", "not_ready"]
    engine: EngineState


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    """Version of aioserve."""


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    """Version of aioserve."""
    models: list[str]
    """Names under which the model is served."""
    state: EngineState
    max_model_len: int
    """Most tokens of a prompt and its answer together."""
    num_pages: int
    """Pages of the KV cache."""
    engine: dict[str, Any]
    """Options of the engine by name, as they were given."""


class PrefixCacheReset(msgspec.Struct, frozen=True, kw_only=True):
    pages: int
    """KV pages that were dropped from the cache, on the device and on the host."""


class AbortRequest(Strict, frozen=True, kw_only=True):
    request_ids: list[str]
    """Ids of calls, as in their `x-request-id`."""


class AbortOne(Strict, frozen=True, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None
    """End every call, in place of one."""


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    aborted: int
    """Number of calls that were ended."""


def health_of(state: EngineState, stats: EngineStats, max_step_age_seconds: float) -> Health:
    """Health of an engine with this state and these figures."""
    status: Literal["ok", "stalled", "failed", "closed"] = "ok"
    if state == "failed":
        status = "failed"
    elif state not in ("open", "draining"):
        status = "closed"
    elif stats.step_age_seconds >= max_step_age_seconds:
        status = "stalled"
    return Health(
        status=status,
        engine=state,
        step_age_seconds=stats.step_age_seconds,
        max_step_age_seconds=max_step_age_seconds,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        steps_total=stats.steps_total,
    )


@endpoint(OPENAI_ERRORS, "/health", "Whether steps make progress", answer=Health)
async def health(call: Call, _: None) -> Answer:
    engine, limit = call.engine, call.settings.max_step_age_seconds
    found = health_of(engine.state, engine.stats(), limit)
    return Answer(found, 200 if found.status == "ok" else 503)


ping: Endpoint[None] = replace(health, path="/ping", summary="The same as /health")
"""Other path of `/health`, which some platforms request."""


@endpoint(OPENAI_ERRORS, "/ready", "Whether requests are taken", answer=Readiness)
async def ready(call: Call, _: None) -> Answer:
    state = call.engine.state
    if state == "open":
        return Answer(Readiness(status="ready", engine=state))
    retry = {"retry-after": str(round(DRAINING_RETRY_SECONDS))}
    return Answer(Readiness(status="not_ready", engine=state), 503, retry)


@endpoint(OPENAI_ERRORS, "/version", "Which aioserve this is")
async def version(call: Call, _: None) -> Version:
    return Version(version=metadata.version("aioserve"))


@endpoint(OPENAI_ERRORS, "/server_info", "How the server is set up")
async def server_info(call: Call, _: NoParameters) -> ServerInfo:
    engine = call.engine
    return ServerInfo(
        version=metadata.version("aioserve"),
        models=list(call.app_state.model_names),
        state=engine.state,
        max_model_len=engine.facts.limits.max_model_len,
        num_pages=engine.facts.limits.num_pages,
        engine=msgspec.to_builtins(engine.config),
    )


@endpoint(OPENAI_ERRORS, "/reset_prefix_cache", "Forget cached prefixes", method="POST")
async def reset_prefix_cache(call: Call, _: None) -> PrefixCacheReset:
    """Drop the cached prefixes of all keys that no request uses."""
    return PrefixCacheReset(pages=call.engine.reset_prefix_cache())


class _Every:
    def __contains__(self, _: object) -> bool:
        return True


@endpoint(OPENAI_ERRORS, "/abort_requests", "End calls by their ids", method="POST")
async def abort_requests(call: Call, body: AbortRequest) -> Aborted:
    """End the calls of any key with these ids. Unknown ids are ignored."""
    calls = call.app_state.calls
    return Aborted(aborted=calls.abort(frozenset(body.request_ids), call.call_log))


@endpoint(OPENAI_ERRORS, "/abort_request", "End a call by its id, or all", method="POST")
async def abort_request(call: Call, body: AbortOne) -> Aborted:
    if (body.rid is None) == (not body.abort_all):
        raise refuse("rid", "or abort_all=true must be given, and not both")
    ids = _Every() if body.rid is None else {body.rid}
    return Aborted(aborted=call.app_state.calls.abort(ids, call.call_log))
