"""`EngineLifecycle`: an engine starts, serves, drains, closes or fails, on one event loop, once.

It makes scheduler, core loop and intake at the start, and checks who may use them. It knows nothing
of single requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from aioserve.arguments import counted, shown
from aioserve.config import EngineConfig
from aioserve.drafting.drafter import Drafter
from aioserve.drafting.guarded import GuardedDrafter
from aioserve.drafting.loaded import loaded_by_engine
from aioserve.engine.core import CoreLoop
from aioserve.engine.engine_arguments import EngineArguments
from aioserve.engine.event_loop import SubmissionTurns, check_on, check_process, running_loop
from aioserve.engine.intake import Intake
from aioserve.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    EngineState,
    WrongLoopError,
)
from aioserve.execution import loading
from aioserve.execution.runner import LoadedModel
from aioserve.kv.eviction import Eviction
from aioserve.kv.memory import KVMemory
from aioserve.models.known import KnownKinds
from aioserve.paging.layout import group_specs
from aioserve.plugins import Admission, Observer, Observers, PluginRegistry
from aioserve.plugins.files import drafter_of_file, policy_of_file
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.state import SLOTS_PER_SEQUENCE
from aioserve.text.output_parsers.registry import OutputParsers
from aioserve.timings import clock_of

__all__ = ["EngineLifecycle"]

logger: logging.Logger = logging.getLogger(__name__)

_tasks: set[asyncio.Task[None]] = set()
"""Tasks of all engines. A loop holds tasks weakly. These must outlive an engine that is dropped
unclosed, so that they end properly."""


class Plugins(msgspec.Struct, frozen=True):
    """Plugin objects of one engine."""

    registry: PluginRegistry
    policy: SchedulingPolicy
    policy_name: str | None
    """Name for logs and errors, with its distribution. None for an object, which goes by its
    class."""
    eviction: Eviction
    drafter: Drafter | None
    """Drafter that `speculation` names."""
    drafter_label: str
    observers: Observers
    admission: Admission
    parsers: OutputParsers
    """Parsers of tool calls and reasoning, the bundled ones included."""


class EngineLifecycle:
    """States: "new", "loading", "open", perhaps "draining", "closed". "failed" replaces "open"
    after a bug or the loss of the device."""

    # Set by `start`, and kept after the end.
    model: LoadedModel
    scheduler: Scheduler
    core: CoreLoop
    intake: Intake
    parsers: OutputParsers
    turns: SubmissionTurns
    drafter: GuardedDrafter | None
    """Drafter of the engine; None without speculation."""

    def __init__(self, config: EngineConfig, arguments: EngineArguments) -> None:
        self.config: EngineConfig = config
        self._arguments = arguments
        self._observing: list[Observer] = []
        self._state: EngineState = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop that it was started on."""
        self._pid = os.getpid()
        """Process that it was started in."""
        self._starting: asyncio.Task[object] | None = None
        self._started_or_not = asyncio.Event()
        """Set once `start` is over, whatever its result."""
        self._serving: asyncio.Task[None] | None = None
        """Task of the core loop. Set once `start` has made everything."""
        self._closing: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        failed = self.is_started and self.core.failure is not None
        return "failed" if failed and self._state == "open" else self._state

    @property
    def is_started(self) -> bool:
        """True once `start` has made everything, also after the end."""
        return self._serving is not None

    @property
    def model_label(self) -> str:
        """Name of the model, or the class of a model object."""
        model = self._arguments.model
        return str(model) if isinstance(model, str | Path) else type(model).__name__

    # -- start

    async def start(self) -> None:
        """Load and start everything. Raises what entering an `Engine` does."""
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
            found = await asyncio.to_thread(_found, self.config, self._arguments)
            self._check_loading()
            plugins = self._select(*found)
            model = await self._load(plugins.drafter, plugins.registry.known_kinds())
            try:
                self._check_loading()
                self._assemble(plugins, model)
                await self.intake.compiler.prepare()
                self._check_loading()
                self._serving = self._new_task(loop, self.core.run())
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

    def _select(
        self,
        registry: PluginRegistry,
        make_policy: Callable[[], SchedulingPolicy] | None,
        make_drafter: Callable[[], Drafter] | None,
    ) -> Plugins:
        registry.check_selected()
        observers = registry.make_observers()
        for observer in self._observing:
            observers.attach(observer, type(observer).__name__)
        policy, name = self._arguments.policy, None
        if make_policy is not None:
            policy = make_policy()
        elif isinstance(policy, str):
            policy, name = registry.policy(policy), registry.policy_label(policy)
        eviction = registry.eviction(self.config.eviction)
        drafter, label = None, ""
        if make_drafter is not None:
            drafter = make_drafter()
            label = type(drafter).__name__
        elif self.config.speculation is not None:
            drafter = registry.drafter(self.config.speculation.drafter)
            label = registry.drafter_label(self.config.speculation.drafter)
        admission = registry.admission()
        parsers = registry.output_parsers(self.config.tool_parser, self.config.reasoning_parser)
        return Plugins(
            registry, policy, name, eviction, drafter, label, observers, admission, parsers
        )

    async def _load(self, drafter: Drafter | None, known: KnownKinds) -> LoadedModel:
        arguments, num_slots = self._arguments, SLOTS_PER_SEQUENCE * self.config.max_num_seqs
        loaded = loaded_by_engine(drafter)
        if isinstance(arguments.model, str | Path):
            return await loading.load(
                str(arguments.model),
                self.config,
                num_slots=num_slots,
                progress=arguments.progress,
                capture_progress=arguments.capture_progress,
                drafter=loaded,
                known=known,
            )
        if loaded is not None:
            raise ConfigError(
                f"drafter {loaded.kind!r} needs a model that the engine loads by name, got "
                f"{shown(arguments.model)}",
                argument="speculation",
                value=self.config.speculation,
            )
        return await arguments.model.load(self.config, num_slots=num_slots)

    def _assemble(self, plugins: Plugins, model: LoadedModel) -> None:
        """Make scheduler, core loop and intake, which nothing serves yet."""
        config = self.config
        self.model = model
        self.scheduler = Scheduler(
            _memory(config, plugins.eviction, model),
            plugins.policy,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            output_reserve_tokens=config.output_reserve_tokens,
            clock=clock_of(asyncio.get_running_loop()),
            policy_name=plugins.policy_name,
        )
        self.core = CoreLoop(
            self.scheduler,
            model.runner,
            observers=plugins.observers,
            name=model.name.rsplit("/", 1)[-1],
            overlap=config.overlap,
            jump_forward=config.jump_forward and model.takes_forced,
            stall_timeout_seconds=config.stall_timeout_seconds,
            shape=model.shape,
        )
        model.processors[:] = plugins.registry.processor_makers
        self.parsers = plugins.parsers
        self.drafter = _given_drafter(config, plugins, model)
        self.intake = Intake(
            config,
            model,
            self.core,
            plugins.admission,
            plugins.registry.logits_processor,
            self.parsers,
        )
        self.turns = SubmissionTurns()

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        task = loop.create_task(coroutine, name=f"aioserve {self.model.name}")
        # If the loop is gone first, `abandon` reports it, in fewer words.
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
        return task

    # -- end

    async def drain(self, deadline_seconds: float | None) -> int:
        """Drain as `Engine.drain` does. The deadline is already checked."""
        if self._state == "draining":
            self._check()
        else:
            self.usable()
        self._state = "draining"
        with anyio.move_on_after(deadline_seconds):
            await self.intake.encoder.wait_idle()
            await self.intake.compiler.wait_idle()
            await self.core.wait_idle()
            return 0
        drained = "the engine was drained before this request ended"
        error = EngineClosedError(drained, state=self._state)
        ended = await self.core.delivery.abort_all(error)
        self.intake.encoder.abort_all(error)
        return ended

    async def close(self) -> None:
        """Close as leaving an `Engine` does. May be called at any time, repeatedly."""
        if self._loop is None:
            self._state = "closed"
            return
        check_on(self._loop, self._pid, "the engine")
        if self._starting is not None and self._starting is asyncio.current_task():
            raise EngineError("an engine can't be closed by the task that enters it")
        self._state = "closed"
        await self._started_or_not.wait()
        if self._serving is not None:
            if self._closing is None:
                self._closing = asyncio.ensure_future(self._end(self._serving))
            await _finish(self._closing)

    async def _end(self, serving: asyncio.Task[None]) -> None:
        """End every request, let the steps in flight end, and stop the runner."""
        closed = "the engine was closed before this request ended"
        try:
            await self.core.delivery.abort_all(EngineClosedError(closed, state="closed"))
            await self.intake.encoder.aclose()
            await self.intake.compiler.aclose()
            self.core.stop()
            await asyncio.wait([serving])
            if isinstance(self.core.failure, KeyboardInterrupt | SystemExit):
                serving.exception()  # mark as retrieved: the event loop has raised it
        finally:
            await self.core.guides.aclose()
            await self.model.runner.aclose()

    def abandon(self, engine: object) -> None:
        """Close the rest of `engine`, which was dropped unclosed, as soon as its loop runs.

        The garbage collector calls this, on any thread. A forked process closes nothing: the engine
        goes on in the parent.
        """
        loop, serving = self._loop, self._serving
        if loop is None or serving is None or self._state == "closed" or os.getpid() != self._pid:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: self._new_task(loop, self._end(serving)))
        _tasks.discard(serving)  # the loop has it now, with this engine, until it is closed
        logger.warning(
            "an engine with the model %s was never closed: use `async with`", self.model.name
        )
        warning = f"{engine!r} was never closed"
        warnings.warn(warning, ResourceWarning, stacklevel=2, source=engine)

    # -- observers

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Report events to `observer`, already checked; call the returned function to stop.

        Raises `WrongLoopError`.
        """
        if self.is_started:
            self.at_rest().core.observer_events.observers.attach(observer, type(observer).__name__)
        self._observing.append(observer)
        return partial(self._observe_no_more, observer)

    def _observe_no_more(self, observer: Observer) -> None:
        self._observing = [one for one in self._observing if one is not observer]
        if self.is_started:
            self.at_rest().core.observer_events.observers.detach(observer)

    # -- who may use it

    def started(self) -> EngineLifecycle:
        """Return self, for facts that never change. Raises `EngineClosedError` before the start."""
        if not self.is_started:
            raise EngineClosedError(
                f"the engine is {self._state}: use it inside `async with`", state=self._state
            )
        return self

    def at_rest(self) -> EngineLifecycle:
        """Return self, for reading state that the core loop changes.

        Raises `EngineClosedError` before the start, and `WrongLoopError` if the state may change
        meanwhile.
        """
        self.started()
        closed = self._closing is not None and self._closing.done()
        if not closed:
            check_process(self._pid, "the engine")
            if self._loop is not None and self._loop.is_running():
                check_on(self._loop, self._pid, "the engine")
        return self

    def usable(self) -> EngineLifecycle:
        """Return self, for requests. Raises `EngineClosedError`, `WrongLoopError`, and the error
        of an engine that has failed."""
        if self._state != "open":
            self.started()
            raise EngineClosedError(
                f"the engine is {self._state} and takes no requests", state=self._state
            )
        self._check()
        return self

    def _check(self) -> None:
        """Raise unless this is the engine's loop and the core loop works."""
        if self._loop is not None:
            check_on(self._loop, self._pid, "the engine")
        if self.core.failure is not None:
            raise self.core.why_ended() from self.core.failure


def _memory(config: EngineConfig, eviction: Eviction, model: LoadedModel) -> KVMemory:
    """Make KV memory. Raises `ConfigError` if it can't hold the longest request."""
    memory = KVMemory.of(
        (model.limits.num_pages, config.num_host_pages),
        config.page_size,
        groups=group_specs(model.limits.num_window_groups, model.limits.window),
        prefix_caching=config.prefix_caching,
        partial_page_reuse=config.partial_page_reuse,
        eviction=eviction,
        preemption=config.preemption,
    )
    if model.limits.max_model_len > memory.capacity_tokens:
        raise ConfigError(
            f"max_model_len of {model.name} is {model.limits.max_model_len}, but "
            f"{counted(model.limits.num_pages, 'page')} of "
            f"{counted(config.page_size, 'token')} hold "
            f"{memory.capacity_tokens}"
        )
    return memory


def _given_drafter(
    config: EngineConfig, plugins: Plugins, model: LoadedModel
) -> GuardedDrafter | None:
    """Give the model's runner the drafter, if there is one.

    Raises `ConfigError` if the runner or the drafter can't do what `speculation` asks for.
    """
    if plugins.drafter is None:
        return None
    if model.take_drafter is None:
        device = model.description.get("device")
        raise ConfigError(
            f"speculation isn't supported on {device}, where {model.name} runs: its runner "
            "verifies no draft tokens, so leave speculation out",
            argument="speculation",
            value=config.speculation,
        )
    wanted = 0 if config.speculation is None else config.speculation.max_branches
    if wanted > model.max_branches:
        raise ConfigError(
            f"max_branches={wanted} of speculation isn't supported where {model.name} runs: its "
            f"runner verifies {counted(model.max_branches, 'path')} of draft tokens beside the "
            "first, so leave max_branches out",
            argument="speculation",
            value=config.speculation,
        )
    if wanted and type(plugins.drafter).branches is Drafter.branches:
        raise ConfigError(
            f"max_branches={wanted} of speculation has no effect with drafter "
            f"{plugins.drafter_label}, which makes none: leave max_branches out",
            argument="speculation",
            value=config.speculation,
        )
    drafter = GuardedDrafter(plugins.drafter, model.limits.vocab_size, plugins.drafter_label)
    model.take_drafter(drafter)
    return drafter


def _found(
    config: EngineConfig, arguments: EngineArguments
) -> tuple[PluginRegistry, Callable[[], SchedulingPolicy] | None, Callable[[], Drafter] | None]:
    """Find the plugins, and the makers of a policy or drafter that is a class in a file.

    Called on a thread. It also imports the backend of anyio, which anyio otherwise imports with its
    first scope, on the event loop.
    """
    with contextlib.suppress(ModuleNotFoundError):  # other versions of anyio have it elsewhere
        importlib.import_module("anyio._backends._asyncio")
    registry = PluginRegistry(arguments.plugins)
    policy, speculation = arguments.policy, config.speculation
    return (
        registry,
        policy_of_file(policy) if isinstance(policy, str) else None,
        None if speculation is None else drafter_of_file(speculation.drafter),
    )


async def _finish(closing: Awaitable[None]) -> None:
    """Run `closing` to its end, even if the caller is cancelled meanwhile by any means.

    A step thread must not outlive its engine. This takes as long as the steps in flight.
    """
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
