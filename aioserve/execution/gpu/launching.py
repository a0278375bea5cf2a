"""The step thread's part of a step: everything that is enqueued, in its order.

    main     [copy in]..........wait copied [ compute ][copy out] done
    copies   wait before? [ page copies ] copied

Page copies run on a stream of their own, beside the steps before, and this step's computation
begins after them. The pages that copies write are free to be written: the scheduler gives no page
away while a step in flight may touch it. Those that they read may be written by a step in flight,
and only then the copies wait for `before`, which is what was enqueued on the main stream until now.

Whatever goes wrong, the step's `done` is recorded: what was enqueued of it still runs, and until
that has ended, its pages and its pinned block stay its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.batch import StepArrays
from aioserve.execution.gpu.device import Device, Event, HostMemory, Stream
from aioserve.execution.gpu.failures import DeviceFailedError, OutOfDeviceMemoryError
from aioserve.execution.gpu.graphs import DecodeGraphs, GraphKey
from aioserve.execution.gpu.step_model import PackedStep, StepModel, outcome_of
from aioserve.execution.gpu.timing import StepEvents, StepTimer
from aioserve.execution.gpu.waiting import Expected, Handler
from aioserve.execution.loop_callbacks import LoopCallbacks
from aioserve.execution.speculation.resolver import StepFollower
from aioserve.kv.pages import full_pages
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["Block", "Launcher", "StepInFlight"]

logger: logging.Logger = logging.getLogger(__name__)

COPIES_AT_FIRST = 256
"""Page copies for which a block has room; it gets more with the first step that needs more."""

Locations = npt.NDArray[np.int64]


class Block:
    """What the host and the device share for one step. The next step that uses it is launched when
    the loop has heard of the end of this one."""

    def __init__(self, device: Device, model: StepModel) -> None:
        self.inputs: HostMemory = device.host_memory(model.max_input_bytes)
        self.results: HostMemory = device.host_memory(model.max_result_bytes)
        self.copies: HostMemory = device.host_memory(20 * COPIES_AT_FIRST)
        self.before: Event = device.new_event()
        self.copied: Event = device.new_event()
        self.done: Event = device.new_event()


@dataclass(eq=False, slots=True, kw_only=True)
class StepInFlight:
    """One step, from its launch until the loop has heard of its end."""

    step: StepArrays
    block: Block
    device: Device
    told: Callable[[StepInFlight, StepOutcome | Exception], None]
    """Called on the loop with the step's result."""
    callbacks: LoopCallbacks
    padding: GraphKey | None = None
    """The step is nothing but padding, to run what a graph of it will be."""
    followed: StepPlan | None = None
    """Plan of which a follower hears before any of it is enqueued."""
    locations_in_flight: Sequence[Locations] = ()
    """Where the steps write that are in flight already."""
    graph_key: GraphKey | None = None
    """Key of the graph of a step that is padded."""
    packed: PackedStep | None = None
    error: Exception | None = None
    """Why not all of it was enqueued."""
    enqueued_seconds: float | None = None
    timed: tuple[StepTimer, StepEvents] | None = None
    """Timer and times of a step that is timed."""

    @property
    def event(self) -> Event:
        return self.block.done

    @property
    def is_done(self) -> bool:
        try:
            return self.block.done.is_done
        except Exception:  # whoever waits for the event hears of it, in `end`
            return True

    def end(self, error: Exception | None) -> None:
        """Its event is done, or says why it never will be."""
        result: StepOutcome | Exception
        if error is None:
            result = self.error or self._outcome()
        else:
            result = failed_for_good(self.device, error)
        self.callbacks.put(functools.partial(self.told, self, result))

    def _outcome(self) -> StepOutcome | Exception:
        if self.timed is not None:
            timer, timed = self.timed
            size = None if self.graph_key is None else self.graph_key.size
            try:
                timer.note(timed, self.step.step, size)
            except Exception as error:
                return error
        if self.packed is None or self.padding is not None:
            return StepOutcome(step=self.step.step, token_ids=())
        try:
            return outcome_of(self.step, self.block.results.array, self.packed.result_shape)
        except InvariantError as error:
            return error

    def __str__(self) -> str:
        batch, step = self.step.batch, self.step
        tokens = 0 if batch is None else len(batch.token_ids)
        sequences = 0 if batch is None else len(batch.context_lens)
        how = "eager" if self.graph_key is None else f"padded to {self.graph_key.size}"
        return (
            f"step {step.step}: {tokens} tokens of {sequences} sequences, {how}, "
            f"{len(step.copies)} page copies"
        )


class Launcher:
    """Launches steps one after the other. Made on the loop's thread, used on the step thread, which
    is inside `within`."""

    def __init__(
        self,
        device: Device,
        model: StepModel,
        graphs: DecodeGraphs,
        clock: Callable[[], float],
        follower: StepFollower | None = None,
    ) -> None:
        self._device = device
        self._follower = follower
        self._model = model
        self._graphs = graphs
        self._clock = clock
        self.main: Stream = device.new_stream()
        self._copies = device.new_stream()
        self.timer: StepTimer | None = None
        """Times the steps that are launched from now on."""
        self._before: Event | None = None
        """Done when the step that was launched last is."""
        # One of each is enough: on the device, the next step's come after this one's.
        self._inputs = device.memory(model.max_input_bytes)
        self._results = device.memory(model.max_result_bytes)

    @contextmanager
    def within(self) -> Iterator[None]:
        """What the step thread enters."""
        with self._device.within(), self.main.current():
            yield

    def begin(self) -> None:
        """Before the first step. What made the model was enqueued on streams of its own, which have
        no order with these: weights that are still on their way, slots that are not zero yet."""
        with contextlib.suppress(Exception):  # the first step will fail with it
            self._device.synchronize()

    def follow(self, plan: StepPlan) -> None:
        """Let the follower hear of a step that is enqueued next. Raises what it raises."""
        if self._follower is not None:
            self._follower.take(plan)
            self._follower.follow(plan)

    def pass_by(self, plan: StepPlan) -> None:
        """Let the follower hear of a step that has failed."""
        with contextlib.suppress(Exception):  # it has failed for another reason
            self.follow(plan)

    def launch(self, flight: StepInFlight, waiting: Handler[Expected]) -> None:
        """Enqueue a step, and have its end waited for."""
        for enqueue in (self._enqueue, self._record_done):
            try:
                enqueue(flight)
            except Exception as error:
                flight.error = flight.error or self._device.meaning_of(error)
        packed, key = flight.packed, flight.graph_key
        is_whole = flight.error is None
        flight.enqueued_seconds = self._clock()
        waiting.put(flight)
        # From here on the block may belong to another step.
        if is_whole and packed is not None and key is not None and self._graphs.is_missing(key):
            inputs, results = self._inputs, self._results
            self._graphs.capture(key, lambda: packed.enqueue(inputs, results))

    def _record_done(self, flight: StepInFlight) -> None:
        self.main.record(flight.block.done)
        self._before = flight.block.done

    def _enqueue(self, flight: StepInFlight) -> None:
        if self.timer is None:
            self._enqueue_parts(flight)
            return
        timer, timed = self.timer, self.timer.begin(self.main)
        try:
            self._enqueue_parts(flight)
        finally:
            timer.end(timed, self.main)
        flight.timed = timer, timed

    def _enqueue_parts(self, flight: StepInFlight) -> None:
        step, block = flight.step, flight.block
        if flight.followed is not None:
            self.follow(flight.followed)
        packed = self._pack(flight)
        if packed is not None:
            self.main.copy_to_device(self._inputs, block.inputs, packed.num_bytes)
        if len(step.copies):
            self._copy_pages(flight)
        if packed is not None:
            if (masks := step.masks) is not None and self._before is not None:
                masks.wait_for_step_before = self._before.synchronize
            self._compute(packed, flight.graph_key)
            if num_bytes := packed.result_shape.num_bytes:
                self.main.copy_to_host(block.results, self._results, num_bytes)

    def _pack(self, flight: StepInFlight) -> PackedStep | None:
        """None for a step that computes nothing."""
        batch, inputs = flight.step.batch, flight.block.inputs
        if flight.padding is not None:
            size, variant = flight.padding
            packed = self._model.pack_padding(inputs, size, variant)
        elif batch is not None:
            size = self._graphs.size_for(flight.step)
            packed = self._model.pack(flight.step, inputs, size)
        else:
            return None
        flight.packed = packed
        flight.graph_key = None if size is None else GraphKey(size, packed.variant)
        return packed

    def _copy_pages(self, flight: StepInFlight) -> None:
        block, copies = flight.block, flight.step.copies
        num_bytes = copies.nbytes
        if len(block.copies.array) < num_bytes:
            block.copies = self._device.host_memory(2 * num_bytes)
        block.copies.array[:num_bytes] = copies.reshape(-1).view(np.uint8)
        if reads_any_of(copies, flight.locations_in_flight, self._model.page_size):
            self.main.record(block.before)
            self._copies.wait(block.before)
        try:
            with self._copies.current():
                self._model.copy_pages(block.copies, len(copies))
        finally:
            self._copies.record(block.copied)
            self.main.wait(block.copied)

    def _compute(self, packed: PackedStep, key: GraphKey | None) -> None:
        graph = None if key is None else self._graphs.get(key)
        try:
            if graph is not None:
                graph.replay()
            else:
                packed.enqueue(self._inputs, self._results)
            packed.finish(self._inputs, self._results)
        except Exception as error:
            reason = self._device.meaning_of(error)
            if not isinstance(reason, OutOfDeviceMemoryError):
                raise
            logger.warning(
                "%s: %s; what was kept for later is given back, and the step enqueued once more",
                self._device.name,
                reason,
            )
            self._device.free_cached_memory()
            packed.enqueue(self._inputs, self._results)
            packed.finish(self._inputs, self._results)


def failed_for_good(device: Device, error: Exception) -> DeviceFailedError:
    """What it means that an event can't be waited for."""
    meaning = device.meaning_of(error)
    if isinstance(meaning, DeviceFailedError):
        return meaning
    return DeviceFailedError(f"{device.name}: {error!r}").with_cause(error)


def reads_any_of(
    copies: npt.NDArray[np.int32], locations: Sequence[Locations], page_size: int
) -> bool:
    """Whether a page of the device that is copied from holds any of the locations, which count in
    tokens from the start of the cache."""
    sources = copies[copies[:, 0] == 0, 1]
    return any(np.isin(sources, full_pages(written, page_size)).any() for written in locations)
