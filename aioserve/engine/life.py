"""An engine's life: it starts, drains, closes, fails, and knows meanwhile who may use it.

What is between start and end is a `LiveEngine`, which is all that this knows of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec

from aioserve.config import EngineConfig
from aioserve.engine.event_loop import check_on, running_loop
from aioserve.engine.live import Chosen, LiveEngine
from aioserve.errors import EngineClosedError, EngineError, EngineState, WrongLoopError
from aioserve.execution import loading
from aioserve.execution.runner import LoadedModel, ModelSource
from aioserve.plugins import Observer, PluginRegistry
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.state import SLOTS_PER_SEQUENCE

__all__ = ["Given", "Life"]


class Given(msgspec.Struct, frozen=True):
    """What an engine is made of, as its caller gave it: checked, and neither found nor loaded."""

    model: str | Path | ModelSource
    policy: str | SchedulingPolicy
    plugins: tuple[object, ...]
    progress: Callable[[int, int], None] | None
    capture_progress: Callable[[int, int], None] | None


class Life:
    """Of one engine, on one event loop, once: "new", "loading", "open", perhaps "draining",
    "closed"."""

    def __init__(self, config: EngineConfig, given: Given) -> None:
        self._config = config
        self._given = given
        self._observing: list[Observer] = []
        self.live: LiveEngine | None = None
        """From when it has started; it stays after the end."""
        self._state: EngineState = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that it was started on."""
        self._pid = os.getpid()
        """Of the process that it was started in."""
        self._starting: asyncio.Task[object] | None = None
        self._started_or_not = asyncio.Event()
        """`start` is over, however it ended."""
        self._closing: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        """ "failed" where a bug or the device has ended it."""
        failed = self.live is not None and self.live.core.failure is not None
        return "failed" if failed and self._state == "open" else self._state

    @property
    def model(self) -> str:
        """Its name, or of an object the class."""
        model = self._given.model
        return str(model) if isinstance(model, str | Path) else type(model).__name__

    # -- from start to end

    async def start(self) -> None:
        """Raises what entering an `Engine` does."""
        if self._state != "new":
            raise EngineClosedError(
                "an engine can be entered once; make another", state=self._state
            )
        loop = running_loop()
        if loop is None:
            raise WrongLoopError(
                "an engine needs asyncio, and no event loop of asyncio runs here; under trio, run "
                "it with asyncio in a thread of its own"
            )
        self._state, self._loop, self._starting = "loading", loop, asyncio.current_task()
        self._pid = os.getpid()
        try:
            registry = await asyncio.to_thread(_plugins, self._given.plugins)
            self._check_loading()
            chosen = self._choose(registry)
            model = await self._load()
            try:
                self._check_loading()
                self.live = LiveEngine(self._config, chosen, model)
            except BaseException:
                await _finish(model.runner.aclose())
                raise
        except BaseException:
            self._state = "closed"
            raise
        finally:
            self._starting = None
            self._started_or_not.set()
        self._state = "open"

    def _check_loading(self) -> None:
        """Raise if the engine was closed while it was loading."""
        if self._state != "loading":
            raise EngineClosedError("the engine was closed while it was loading", state="closed")

    def _choose(self, registry: PluginRegistry) -> Chosen:
        registry.check_selected()
        observers = registry.make_observers()
        for observer in self._observing:
            observers.attach(observer, type(observer).__name__)
        policy, name = self._given.policy, None
        if isinstance(policy, str):
            policy, name = registry.policy(policy), registry.policy_label(policy)
        return Chosen(
            policy,
            name,
            registry.eviction(self._config.eviction),
            observers,
            registry.admission(),
            registry.logits_processor,
            registry.processor_makers,
        )

    async def _load(self) -> LoadedModel:
        given, num_slots = self._given, SLOTS_PER_SEQUENCE * self._config.max_num_seqs
        if isinstance(given.model, str | Path):
            return await loading.load(
                str(given.model),
                self._config,
                num_slots=num_slots,
                progress=given.progress,
                capture_progress=given.capture_progress,
            )
        return await given.model.load(self._config, num_slots=num_slots)

    async def drain(self, deadline_seconds: float | None) -> int:
        """As `Engine.drain`, with a deadline that was checked."""
        live = self.started()
        if self._state != "draining":
            live = self.usable()
        live.check()
        self._state = "draining"
        with anyio.move_on_after(deadline_seconds):
            await live.wait_idle()
            return 0
        drained = "the engine was drained before this request ended"
        error = EngineClosedError(drained, state=self._state)
        ended = await live.core.delivery.abort_all(error)
        live.intake.encoder.abort_all(error)
        return ended

    async def close(self) -> None:
        """As leaving an `Engine`: at any time, and any number of times."""
        if self._loop is None:
            self._state = "closed"
            return
        check_on(self._loop, self._pid, "the engine")
        if self._starting is not None and self._starting is asyncio.current_task():
            raise EngineError("an engine can't be closed by the task that enters it")
        self._state = "closed"
        await self._started_or_not.wait()
        if self.live is not None:
            if self._closing is None:
                self._closing = asyncio.ensure_future(self.live.aclose())
            await _finish(self._closing)

    def abandon(self, engine: object) -> None:
        """Nobody holds `engine`, whose life this is, any more: what is left is closed. In a forked
        process nothing is, and the engine goes on in the other one."""
        if self.live is not None and self._state != "closed" and os.getpid() == self._pid:
            self.live.abandon()
            warning = f"{engine!r} was never closed"
            warnings.warn(warning, ResourceWarning, stacklevel=2, source=engine)

    # -- who watches

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Tell `observer`, which was checked, of what happens; call what is returned to end that.
        Raises `WrongLoopError`."""
        if self.live is not None:
            self.at_rest().core.notices.observers.attach(observer, type(observer).__name__)
        self._observing.append(observer)
        return partial(self._observe_no_more, observer)

    def _observe_no_more(self, observer: Observer) -> None:
        self._observing = [one for one in self._observing if one is not observer]
        if self.live is not None:
            self.at_rest().core.notices.observers.detach(observer)

    # -- who may use it

    def started(self) -> LiveEngine:
        """For what doesn't change. Raises `EngineClosedError` before the start."""
        if self.live is None:
            raise EngineClosedError(
                f"the engine is {self._state}: use it inside `async with`", state=self._state
            )
        return self.live

    def at_rest(self) -> LiveEngine:
        """For those who read what the core loop changes. Raises `WrongLoopError` too, where it may
        change meanwhile."""
        live = self.started()
        closed = self._closing is not None and self._closing.done()
        if not closed:
            live.check_at_rest()
        return live

    def usable(self) -> LiveEngine:
        """For requests. Raises `EngineClosedError` and `WrongLoopError`, and what it failed
        with."""
        live = self.started()
        if self._state != "open":
            raise EngineClosedError(
                f"the engine is {self._state} and takes no requests", state=self._state
            )
        live.check()
        return live


def _plugins(given: tuple[object, ...]) -> PluginRegistry:
    """To be called on a thread. What anyio's scopes are made of it imports with the first of them:
    here, and not on the event loop when the engine is drained or closed."""
    with contextlib.suppress(ModuleNotFoundError):  # an anyio that has them elsewhere
        importlib.import_module("anyio._backends._asyncio")
    return PluginRegistry(given)


async def _finish(closing: Awaitable[None]) -> None:
    """Run `closing` to its end although the caller is cancelled meanwhile, by a task's `cancel`,
    by a timeout or by an anyio scope: a step thread must not outlive its engine. It takes as long
    as the steps in flight."""
    task = asyncio.ensure_future(closing)
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
