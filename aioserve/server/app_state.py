"""State of one app and of each call to it, as handlers receive them.

A draining server refuses new requests, and finishes the answers in progress.

    open ──drain──► draining: /ready says 503, new requests are refused with 503
                        │       running ones go on, until the deadline ends them with an error
                        ▼
                    every answer is sent in full, to clients that read it by then

Installs no signal handler: the program that runs the app calls `drain`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import anyio
from msgspec.structs import replace
from starlette.applications import Starlette

from aioserve.engine.interface import EngineLike, ModelFacts
from aioserve.models.resolve import is_model
from aioserve.request import SamplingParams
from aioserve.sampling_params import DRAWN_FREELY
from aioserve.server.answer_sizes import Kept, Unsent
from aioserve.server.call_log import CallLog
from aioserve.server.errors import ApiError
from aioserve.server.openai.responses_api.store import ResponseStore
from aioserve.server.pace import LoopTurns, Pace
from aioserve.server.settings import ServerSettings
from aioserve.server.step_log.recorder import StepRecorder

__all__ = ["SEND_SECONDS", "AppState", "Call", "Calls", "drain", "name_of"]


class Calls:
    """HTTP requests of one app that haven't ended. The limit on concurrent calls, draining and the
    metrics read these counts."""

    def __init__(self) -> None:
        self.num_requests: int = 0
        """All requests, including refused ones."""
        self.num_posted: int = 0
        """Admitted POST requests, which ask for computation."""
        self.num_running: int = 0
        """Requests whose body is being read, or whose answer isn't fully sent. Streams of the
        engine's activity never end, and don't count."""
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._reading: dict[CallLog, anyio.CancelScope] = {}
        """Cancel scopes of the calls whose bodies are arriving, oldest first."""
        self._scopes: dict[CallLog, anyio.CancelScope] = {}
        """Cancel scopes of the calls that are being answered, by call log."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request from its head to its end."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def running(self, *, posted: bool) -> Iterator[None]:
        """Count a request while it is answered. `posted` is true for a POST."""
        self.num_posted += posted
        self.num_running += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self.num_posted -= posted
            self.num_running -= 1
            if not self.num_running:
                self._none_left.set()

    @contextmanager
    def reading(self, call_log: CallLog) -> Iterator[anyio.CancelScope]:
        """Let `end_oldest_body` cancel the block, as the scope's `cancelled_caught` shows."""
        with anyio.CancelScope() as scope:
            self._reading[call_log] = scope
            try:
                yield scope
            finally:
                self._reading.pop(call_log, None)

    def end_oldest_body(self) -> bool:
        """Cancel the wait for the body that has been arriving longest; return false if none is. A
        client that never sends its body must not keep out others."""
        for call_log, scope in self._reading.items():
            del self._reading[call_log]
            scope.cancel()
            return True
        return False

    @contextmanager
    def ended_by_name(self, call_log: CallLog) -> Iterator[anyio.CancelScope]:
        """Let `abort` cancel the block of a call, as the scope's `cancelled_caught` shows."""
        with anyio.CancelScope() as scope:
            self._scopes[call_log] = scope
            try:
                yield scope
            finally:
                del self._scopes[call_log]

    def abort(self, request_ids: Container[str], but: CallLog) -> int:
        """Cancel the POST calls with these ids, except `but`, and return their number."""
        found = [
            scope
            for call_log, scope in self._scopes.items()
            if call_log.request_id in request_ids
            and call_log.method == "POST"
            and call_log is not but
            and not scope.cancel_called
        ]
        for scope in found:
            scope.cancel()
        return len(found)

    async def wait_none(self) -> None:
        """Wait until no request is running."""
        await self._none_left.wait()


def name_of(model: str) -> str:
    """Name of a model that was loaded as `model`. A path gives its last part, without following
    links. A name or a hub id is returned unchanged."""
    path = os.path.expanduser(model)
    if os.path.isabs(path) or path.startswith(".") or is_model(Path(path)):
        return os.path.basename(os.path.abspath(path)) or model
    return model


class AppState:
    """One engine and its settings, as one app serves them."""

    def __init__(
        self, engine: EngineLike, settings: ServerSettings, steps: StepRecorder | None = None
    ) -> None:
        """`steps` records the steps that the page shows; None without a page."""
        self.engine: EngineLike = engine
        self.settings: ServerSettings = settings
        self.steps: StepRecorder | None = steps
        self.calls: Calls = Calls()
        self.turns: LoopTurns = LoopTurns()
        self.unsent: Unsent = Unsent(settings.max_unsent_bytes)
        self.created_seconds: int = int(time.time())
        """Creation time in the list of models, in seconds since 1970."""
        self.responses: ResponseStore = ResponseStore(
            max_entries=settings.max_stored_responses,
            max_bytes=settings.max_stored_bytes,
            seconds=settings.stored_response_seconds,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may ask for. Answers carry the first."""
        if self.settings.served_model_names:
            return tuple(self.settings.served_model_names)
        return (self.own_name,)

    @cached_property
    def own_name(self) -> str:
        """Name of the model without settings. Cached, as the working directory may change later."""
        return name_of(self.engine.facts.name)

    @cached_property
    def fingerprint(self) -> str:
        """Identifier that answers of the same model, dtype and version of aioserve share."""
        made_by = [metadata.version("aioserve"), self.own_name, self.engine.config.dtype]
        return f"fp_{hashlib.sha256(repr(made_by).encode()).hexdigest()[:12]}"

    @property
    def recorded_steps(self) -> StepRecorder:
        if self.steps is None:
            raise ApiError(404, "this server has no page, and records no steps")
        return self.steps

    def served_name(self, name: str | None) -> str:
        """Name that an answer carries: the requested one, or else the first."""
        return self.model_names[0] if name is None else name

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` for a name that isn't served. None accepts any."""
        if name is None:
            return
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"the model {name!r:.300} isn't served here; {known} is",
                param="model",
                code="model_not_found",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One HTTP request, apart from its body."""

    app_state: AppState
    call_log: CallLog
    """Record of the call, which logs and metrics read at its end."""
    created_seconds: int = field(default_factory=lambda: int(time.time()))
    """Time of arrival, in seconds since 1970."""
    pace: Pace = field(init=False)
    """Budget of the call's work on the event loop, with turns of other calls between."""
    kept: Kept = field(init=False)
    """Size of the call's answer, made or still to be made."""

    def __post_init__(self) -> None:
        state = self.app_state
        object.__setattr__(self, "pace", Pace(state.turns))
        object.__setattr__(self, "kept", Kept(state.unsent, state.settings.max_answer_bytes))

    @property
    def tenant(self) -> str | None:
        return self.call_log.tenant

    @property
    def engine(self) -> EngineLike:
        return self.app_state.engine

    @property
    def facts(self) -> ModelFacts:
        return self.app_state.engine.facts

    @property
    def settings(self) -> ServerSettings:
        return self.app_state.settings

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters for requests without them: the model's own, or else the default of
        OpenAI's API, temperature 1."""
        facts = self.facts
        if facts.says_sampling:
            return facts.default_params
        return replace(facts.default_params, **DRAWN_FREELY)

    def options(self, **more: Any) -> dict[str, Any]:
        """Arguments of every request to the engine, and `more`."""
        return {"tenant": self.tenant, "cache_salt": self.call_log.cache_salt, **more}


SEND_SECONDS = 1.0
"""Seconds that clients may take to read the ends of answers that the deadline has ended."""


async def drain(app: Starlette, deadline_seconds: float | None = None) -> int:
    """Refuse new requests, and wait until all requests in progress are answered.

    After `deadline_seconds`, the engine ends the rest with an error; None waits without limit.
    Returns the number of requests that it ended. Clients must read their answers by then too. To
    read the ends of requests that the deadline has ended, they have at least one second more.

    `app` is the result of `create_app`, mounted anywhere. Its server must keep running meanwhile,
    to answer new requests and `/ready` with 503. Raises as `Engine.drain` does.
    """
    app_state: AppState = app.state.app_state
    clock = asyncio.get_running_loop().time
    began = clock()
    ended = await app_state.engine.drain(deadline_seconds)
    deadline = math.inf if deadline_seconds is None else began + deadline_seconds
    with anyio.move_on_after(max(SEND_SECONDS, deadline - clock())):
        await app_state.calls.wait_none()
    return ended
