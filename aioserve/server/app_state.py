"""What one app serves, and on whose behalf a call comes: what every handler is given.

The end of a server loses nothing: it takes no new requests, and those there are get their answers.

    open ──drain──► draining: /ready says 503, new requests are refused with 503
                        │       running ones go on, until the deadline ends them with an error
                        ▼
                    every answer is sent to its end, to readers that read it by then

Installs no signal handler: the program that runs the app says when.
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
from aioserve.server.steps.recorder import StepRecorder

__all__ = ["SEND_SECONDS", "AppState", "Call", "Calls", "drain", "name_of"]


class Calls:
    """Counts the requests over HTTP of one app that haven't ended, for all that ask: the limit of
    calls in progress, the end of a drain and the metrics."""

    def __init__(self) -> None:
        self.num_requests: int = 0
        """All requests, refused ones too."""
        self.num_posted: int = 0
        """Requests that were let in and ask for something to be computed."""
        self.num_running: int = 0
        """Requests whose body is being read, or whose answer isn't sent to its end. A stream that
        shows what the engine does has no end, and is none of them."""
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._reading: dict[CallLog, anyio.CancelScope] = {}
        """Cancel scopes of the calls whose bodies are coming, the oldest first."""
        self._scopes: dict[CallLog, anyio.CancelScope] = {}
        """Cancel scopes of the calls that are being answered, by the log of each call."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request from its head on."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def running(self, *, posted: bool) -> Iterator[None]:
        """Count one that has an end while it is answered."""
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
        """Let `end_oldest_body` end what is done within; whether it did, the scope says."""
        with anyio.CancelScope() as scope:
            self._reading[call_log] = scope
            try:
                yield scope
            finally:
                self._reading.pop(call_log, None)

    def end_oldest_body(self) -> bool:
        """Wait no longer for the body that is coming for the longest time; return whether there is
        one. Clients that send no bodies must not keep out those that do."""
        for call_log, scope in self._reading.items():
            del self._reading[call_log]
            scope.cancel()
            return True
        return False

    @contextmanager
    def ended_by_name(self, call_log: CallLog) -> Iterator[anyio.CancelScope]:
        """Let `abort` end what is done within for a call; whether it did, the scope says."""
        with anyio.CancelScope() as scope:
            self._scopes[call_log] = scope
            try:
                yield scope
            finally:
                del self._scopes[call_log]

    def abort(self, request_ids: Container[str], but: CallLog) -> int:
        """End the calls that ask for something to be computed and go by these ids, but for one;
        return how many there were."""
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
        """Wait until none is running."""
        await self._none_left.wait()


def name_of(model: str) -> str:
    """What a model is called that was loaded as `model`: by the last part of a path, which a link
    has as it is called; by a name or a hub id as they are."""
    path = os.path.expanduser(model)
    if os.path.isabs(path) or path.startswith(".") or is_model(Path(path)):
        return os.path.basename(os.path.abspath(path)) or model
    return model


class AppState:
    """One engine, as one app shows it."""

    def __init__(
        self, engine: EngineLike, settings: ServerSettings, steps: StepRecorder | None = None
    ) -> None:
        """`steps` are what the page shows, where there is one."""
        self.engine: EngineLike = engine
        self.settings: ServerSettings = settings
        self.steps: StepRecorder | None = steps
        self.calls: Calls = Calls()
        self.turns: LoopTurns = LoopTurns()
        self.unsent: Unsent = Unsent(settings.max_unsent_bytes)
        self.created_seconds: int = int(time.time())
        """Since 1970: what the list of models says."""
        self.responses: ResponseStore = ResponseStore(
            max_entries=settings.max_stored_responses,
            max_bytes=settings.max_stored_bytes,
            seconds=settings.stored_response_seconds,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may ask for; the first is the one that answers carry."""
        if self.settings.served_model_names:
            return tuple(self.settings.served_model_names)
        return (self.own_name,)

    @cached_property
    def own_name(self) -> str:
        """The name of the model by itself. The working directory may change later."""
        return name_of(self.engine.facts.name)

    @cached_property
    def fingerprint(self) -> str:
        """What answers of the same model, dtype and version of aioserve have in common."""
        made_by = [metadata.version("aioserve"), self.own_name, self.engine.config.dtype]
        return f"fp_{hashlib.sha256(repr(made_by).encode()).hexdigest()[:12]}"

    @property
    def recorded_steps(self) -> StepRecorder:
        if self.steps is None:
            raise ApiError(404, "this server has no page, and records no steps")
        return self.steps

    def served_name(self, name: str | None) -> str:
        """The name that an answer carries: the one that was asked for, or else the first."""
        return self.model_names[0] if name is None else name

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` for a name that isn't served; None asks for whatever is."""
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
    """One request over HTTP, as far as it isn't its body."""

    app_state: AppState
    call_log: CallLog
    """What is told of it when it ends."""
    created_seconds: int = field(default_factory=lambda: int(time.time()))
    """When it came, since 1970."""
    pace: Pace = field(init=False)
    """Budget of the call's work on the event loop. Others run in between."""
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
        """Sampling of requests that don't say it, for an API that documents it. It is what the
        model's files say, or else the default of OpenAI's API: temperature 1."""
        facts = self.facts
        if facts.says_sampling:
            return facts.default_params
        return replace(facts.default_params, **DRAWN_FREELY)

    def options(self, **more: Any) -> dict[str, Any]:
        """What every request to the engine carries, and `more`."""
        return {"tenant": self.tenant, "cache_salt": self.call_log.cache_salt, **more}


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
    app_state: AppState = app.state.app_state
    clock = asyncio.get_running_loop().time
    began = clock()
    ended = await app_state.engine.drain(deadline_seconds)
    deadline = math.inf if deadline_seconds is None else began + deadline_seconds
    with anyio.move_on_after(max(SEND_SECONDS, deadline - clock())):
        await app_state.calls.wait_none()
    return ended
