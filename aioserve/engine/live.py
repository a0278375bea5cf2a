"""What exists between entering an engine and leaving it: scheduler, core loop, intake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from aioserve.arguments import counted
from aioserve.config import EngineConfig
from aioserve.engine.core import CoreLoop
from aioserve.engine.event_loop import check_on, check_process
from aioserve.engine.intake import Intake
from aioserve.engine.submission_turns import SubmissionTurns
from aioserve.errors import ConfigError, EngineClosedError
from aioserve.execution.runner import LoadedModel
from aioserve.kv.eviction import Eviction
from aioserve.kv.memory import KVMemory
from aioserve.plugins import Admission, Observers
from aioserve.sampling.processors import ProcessorMaker
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler

__all__ = ["Chosen", "LiveEngine"]

logger: logging.Logger = logging.getLogger(__name__)

_tasks: set[asyncio.Task[None]] = set()
"""Of all engines. A loop holds its tasks weakly, and these outlive an engine that nobody holds any
more, to be ended and not destroyed."""


class Chosen(msgspec.Struct, frozen=True):
    """What plugins give one engine: objects of its own."""

    policy: SchedulingPolicy
    policy_name: str | None
    """For logs and errors, with its distribution; None for an object, which goes by its class."""
    eviction: Eviction
    observers: Observers
    admission: Admission
    logits_processor: Callable[[str], int]
    """Number of a name's logits processor. Raises `ConfigError` or `PluginError`."""
    processors: tuple[ProcessorMaker, ...]
    """What makes them, by number."""


class LiveEngine:
    """Made on the event loop that it serves."""

    def __init__(self, config: EngineConfig, chosen: Chosen, model: LoadedModel) -> None:
        self.config = config
        self.model = model
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._pid = os.getpid()
        memory = KVMemory.of(
            model.limits.num_pages,
            config.page_size,
            num_host_pages=config.num_host_pages,
            prefix_caching=config.prefix_caching,
            partial_page_reuse=config.partial_page_reuse,
            eviction=chosen.eviction,
            preemption=config.preemption,
        )
        if model.limits.max_model_len > memory.capacity_tokens:
            raise ConfigError(
                f"max_model_len of {model.name} is {model.limits.max_model_len}, but "
                f"{counted(model.limits.num_pages, 'page')} of "
                f"{counted(config.page_size, 'token')} hold "
                f"{memory.capacity_tokens}"
            )
        self.scheduler: Scheduler = Scheduler(
            memory,
            chosen.policy,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            output_reserve_tokens=config.output_reserve_tokens,
            clock=self.loop.time,
            policy_name=chosen.policy_name,
        )
        self.core: CoreLoop = CoreLoop(
            self.scheduler,
            model.runner,
            observers=chosen.observers,
            name=model.name.rsplit("/", 1)[-1],
            overlap=config.overlap,
            jump_forward=config.jump_forward,
            stall_timeout_seconds=config.stall_timeout_seconds,
        )
        model.processors[:] = chosen.processors
        self.intake: Intake = Intake(
            config, model, self.core, chosen.admission, chosen.logits_processor
        )
        self.turns: SubmissionTurns = SubmissionTurns()
        self._task = self._new_task(self.core.run())

    def _new_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine, name=f"aioserve {self.model.name}")
        # Where its loop has gone before it, `abandon` says so, and in fewer words.
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
        return task

    def check(self) -> None:
        """Raise unless this is the engine's loop and the core loop works."""
        check_on(self.loop, self._pid, "the engine")
        if self.core.failure is not None:
            raise self.core.why_ended() from self.core.failure

    def check_at_rest(self) -> None:
        """Raise unless this is the engine's process, and its loop, if that runs anywhere."""
        check_process(self._pid, "the engine")
        if self.loop.is_running():
            check_on(self.loop, self._pid, "the engine")

    async def wait_idle(self) -> None:
        """Until no request is left."""
        await self.intake.encoder.wait_idle()
        await self.intake.compiler.wait_idle()
        await self.core.wait_idle()

    async def aclose(self) -> None:
        """End every request, let the steps in flight end, and stop the runner."""
        closed = "the engine was closed before this request ended"
        try:
            await self.core.delivery.abort_all(EngineClosedError(closed, state="closed"))
            await self.intake.encoder.aclose()
            await self.intake.compiler.aclose()
            self.core.stop()
            await asyncio.wait([self._task])
            if isinstance(self.core.failure, KeyboardInterrupt | SystemExit):
                self._task.exception()  # retrieved: whoever runs the event loop has seen it
        finally:
            await self.core.guides.aclose()
            await self.model.runner.aclose()

    def abandon(self) -> None:
        """Nobody holds the engine any more, and nobody has closed it: close it, as soon as its loop
        runs. Called by the collector, on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(lambda: self._new_task(self.aclose()))
        _tasks.discard(self._task)  # the loop has it now, with this engine, until it is closed
        logger.warning(
            "an engine with the model %s was never closed: use `async with`", self.model.name
        )
