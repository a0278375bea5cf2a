"""What one app serves, and on whose behalf a call comes: what every handler is given."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from aioserve.engine.engine import Engine
from aioserve.server.calls import Calls
from aioserve.server.errors import ApiError
from aioserve.server.openai.responses_api.store import ResponseStore
from aioserve.server.record import CallRecord
from aioserve.server.settings import ServerSettings
from aioserve.server.steps.recorder import StepRecorder

__all__ = ["Call", "Served", "name_of"]


def name_of(model: str) -> str:
    """What a model is called that was loaded as `model`: by the last part of a path, which a link
    has as it is called; by a name or a hub id as they are."""
    path = os.path.expanduser(model)
    if os.path.isabs(path) or path.startswith(".") or _is_model(path):
        return os.path.basename(os.path.abspath(path)) or model
    return model


def _is_model(path: str) -> bool:
    """Whether a model is loaded from there, whatever else has the name."""
    return os.path.isfile(os.path.join(path, "config.json"))


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """One engine, as one app shows it."""

    engine: Engine
    settings: ServerSettings
    steps: StepRecorder | None = None
    """What the page shows, where there is one."""
    calls: Calls = field(default_factory=Calls)
    """Those with a body that are being answered."""
    created_seconds: int = field(default_factory=lambda: int(time.time()))
    """Since 1970: what the list of models says."""
    responses: ResponseStore = field(init=False)
    _own_name: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        store = ResponseStore(
            max_entries=self.settings.max_stored_responses,
            max_bytes=self.settings.max_stored_bytes,
            seconds=self.settings.stored_response_seconds,
        )
        object.__setattr__(self, "responses", store)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Those that requests may ask for; the first is the one that answers carry."""
        if self.settings.served_model_names:
            return tuple(self.settings.served_model_names)
        return (self.own_name,)

    @property
    def own_name(self) -> str:
        """The name of the model by itself. The working directory may change later."""
        if self._own_name is None:
            object.__setattr__(self, "_own_name", name_of(self.engine.model_name))
        return self._own_name or ""

    @property
    def recorded_steps(self) -> StepRecorder:
        if self.steps is None:
            raise ApiError(404, "this server has no page, and records no steps")
        return self.steps

    def check_model(self, name: str) -> None:
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

    served: Served
    request_id: str
    """Unique, whatever its client calls it: for ids of answers and of requests to the engine."""
    tenant: str | None = None
    """Whose key it came with."""
    cache_salt: str | None = None
    """Cached prefixes are shared with calls of the same salt alone."""
    created_seconds: int = field(default_factory=lambda: int(time.time()))
    """When it came, since 1970."""
    told: CallRecord = field(default_factory=CallRecord)
    """What is told of it when it ends. A handler adds `told.answers_with(...)` for each whole
    answer of the engine; the owner of `Events` is added by itself."""

    @property
    def engine(self) -> Engine:
        return self.served.engine

    @property
    def settings(self) -> ServerSettings:
        return self.served.settings

    def options(self, **more: Any) -> dict[str, Any]:
        """What every request to the engine carries, and `more`."""
        return {"tenant": self.tenant, "cache_salt": self.cache_salt, **more}
