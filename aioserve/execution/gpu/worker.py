"""The worker of a CUDA device: it enqueues steps, and goes on before they have ended.

    main     [copy in]..........wait copied [ compute ][copy out] done
    copies   wait before? [ page copies ] copied

Page copies run on their own stream, beside earlier steps, and this step's computation begins after
them. It is always safe to write their target pages: the scheduler gives no page away while a step
in flight may touch it. But a step in flight may write pages that the copies read. Then they wait
for `before`, which is recorded after all work on the main stream so far.

Even after an error, the step's `done` is recorded. Its enqueued parts still run, and until they
have ended, its pages and its pinned memory stay its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.gpu.device import Device, Event, HostMemory, Stream
from aioserve.execution.gpu.failures import DeviceFailedError, OutOfDeviceMemoryError
from aioserve.execution.gpu.graphs import DecodeGraphs, GraphKey
from aioserve.execution.gpu.step_model import PackedStep, StepModel, outcome_of
from aioserve.execution.gpu.timing import StepEvents, StepTime, StepTimer
from aioserve.execution.step_arrays import NO_COPIES, StepArrays
from aioserve.ops import SampleRows
from aioserve.paging.pages import full_pages
from aioserve.steps.outcome import StepOutcome

__all__ = ["MAX_IN_FLIGHT", "CudaWorker", "StepOnDevice"]

logger: logging.Logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
"""One step that runs, and one after it."""
COPIES_AT_FIRST = 256
"""Page copies that a step has pinned memory for at first; it grows when more are needed."""
PADDING_STEP = -1
"""Number of a step of nothing but padding, in the log."""
COPIES_STEP = -3
"""Number of a step of nothing but copies, in the log."""

Locations = npt.NDArray[np.int64]


class Buffers:
    """Memory and events that host and device share for a step, until its outcome is read."""

    def __init__(self, device: Device, model: StepModel) -> None:
        self.inputs: HostMemory = device.host_memory(model.max_input_bytes)
        self.results: HostMemory = device.host_memory(model.max_result_bytes)
        self.copies: HostMemory = device.host_memory(20 * COPIES_AT_FIRST)
        self.before: Event = device.new_event()
        self.copied: Event = device.new_event()
        self.done: Event = device.new_event()


@dataclass(eq=False, slots=True, kw_only=True)
class StepOnDevice:
    """A `PendingStep` on the device."""

    step: StepArrays
    buffers: Buffers
    device: Device
    ended: Callable[[StepOnDevice], None]
    """Called when its outcome is read."""
    padding: GraphKey | None = None
    """Key for a step of padding alone, which runs what a graph of it will be."""
    graph_key: GraphKey | None = None
    """Key of the graph of a padded step."""
    packed: PackedStep | None = None
    error: Exception | None = None
    """Error that kept part of it from being enqueued."""
    timed: tuple[StepTimer, StepEvents] | None = None
    """Timer and events of a timed step."""

    @property
    def event(self) -> Event:
        return self.buffers.done

    @property
    def is_done(self) -> bool:
        try:
            return self.event.is_done
        except Exception:  # `outcome` raises it
            return True

    def outcome(self) -> StepOutcome:
        try:
            self._wait()
            if self.error is not None:
                raise self.error
            return self._computed()
        finally:
            self.ended(self)

    def _wait(self) -> None:
        try:
            self.event.synchronize()
        except Exception as error:
            meaning = self.device.meaning_of(error)
            if isinstance(meaning, DeviceFailedError):
                raise meaning from error
            raise DeviceFailedError(f"{self.device.name}: {error!r}") from error

    def _computed(self) -> StepOutcome:
        if self.timed is not None:
            timer, timed = self.timed
            size = None if self.graph_key is None else self.graph_key.size
            timer.note(timed, self.step.step, size)
        if self.packed is None or self.padding is not None:
            return StepOutcome(step=self.step.step, token_ids=())
        return outcome_of(self.step, self.buffers.results.array, self.packed.result_shape)


class CudaWorker:
    """A `Worker` on one device. Made on any thread; used on the step thread, inside `within`."""

    max_in_flight: int = MAX_IN_FLIGHT

    def __init__(
        self,
        device: Device,
        model: StepModel,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        """Decodes run as graphs of `graph_sizes`, captured by `pad` or when they are first
        needed. Without sizes, every step runs eagerly."""
        self.device: Device = device
        self._graphs = DecodeGraphs(device, graph_sizes)
        self._model = model
        self._timer: StepTimer | None = None
        self._before: Event | None = None
        """Done when the step that was begun last is done."""
        self._running: deque[StepOnDevice] = deque()
        """Steps whose outcome hasn't been read."""
        with device.within():
            self.main: Stream = device.new_stream()
            self._copies = device.new_stream()
            # One of each is enough: on the device, steps use them one after the other.
            self._inputs = device.memory(model.max_input_bytes)
            self._results = device.memory(model.max_result_bytes)
            self._free_buffers = deque(Buffers(device, model) for _ in range(MAX_IN_FLIGHT))

    @contextmanager
    def within(self) -> Iterator[None]:
        """Make a context for the step thread."""
        with self.device.within(), self.main.current():
            yield

    @property
    def graph_keys(self) -> Sequence[GraphKey]:
        """Graphs that decode steps may use, largest first."""
        sizes, variants = self._graphs.sizes[::-1], self._model.variants
        return [GraphKey(size, variant) for size in sizes for variant in variants]

    def begin(self) -> None:
        """Wait for all work that made the model, before the first step.

        The worker's streams have no order relative to that work: weights may still be on their way,
        and slots not yet zero.
        """
        with contextlib.suppress(Exception):  # the first step will fail with it
            self.device.synchronize()

    def time_steps(self) -> list[StepTime]:
        """Let the device time each step that begins from now on.

        The returned list grows with each step that ends well, when its outcome is read. Another
        call begins a new list. Timing adds two events to a step, and nothing waits for them.
        """
        with self.device.within():
            timer = StepTimer(self.device, MAX_IN_FLIGHT)
        self._timer = timer
        return timer.times

    def step(self, block: StepArrays) -> StepOnDevice:
        return self._begun(self._new(block))

    def pad(self, key: GraphKey) -> StepOnDevice:
        """Begin a step of nothing but padding, as a graph of this key has it."""
        return self._begun(self._new(_nothing(PADDING_STEP), padding=key))

    def fail(self, step: int, error: Exception) -> StepOnDevice:
        """Begin a step that enqueues nothing, because of an earlier error. It ends in its turn."""
        return self._begun(self._new(_nothing(step), error=self.device.meaning_of(error)))

    def copy(self, copies: npt.NDArray[np.int32]) -> None:
        self.step(_nothing(COPIES_STEP, copies)).outcome()

    def capture(self, pending: StepOnDevice) -> None:
        """Capture the graph of a step that should have one, after the step, unless it exists."""
        packed, key = pending.packed, pending.graph_key
        if pending.error is None and packed is not None and key is not None:
            inputs, results = self._inputs, self._results
            if self._graphs.is_missing(key):
                self._graphs.capture(key, lambda: packed.enqueue(inputs, results))

    def close(self) -> None:
        """Do nothing: the memory is freed with the worker."""

    def _new(
        self, block: StepArrays, padding: GraphKey | None = None, error: Exception | None = None
    ) -> StepOnDevice:
        if not self._free_buffers:
            raise InvariantError(
                f"at most {MAX_IN_FLIGHT} steps may be begun whose outcome isn't read, "
                f"got step {block.step}"
            )
        return StepOnDevice(
            step=block,
            buffers=self._free_buffers.popleft(),
            device=self.device,
            ended=self._ended,
            padding=padding,
            error=error,
        )

    def _ended(self, pending: StepOnDevice) -> None:
        self._running.remove(pending)
        self._free_buffers.append(pending.buffers)

    def _begun(self, pending: StepOnDevice) -> StepOnDevice:
        for enqueue in (self._enqueue, self._record_done):
            try:
                enqueue(pending)
            except Exception as error:
                pending.error = pending.error or self.device.meaning_of(error)
        self._running.append(pending)
        return pending

    def _record_done(self, pending: StepOnDevice) -> None:
        self.main.record(pending.event)
        self._before = pending.event

    def _enqueue(self, pending: StepOnDevice) -> None:
        if pending.error is not None:
            return
        if self._timer is None:
            self._enqueue_parts(pending)
            return
        timer, timed = self._timer, self._timer.begin(self.main)
        try:
            self._enqueue_parts(pending)
        finally:
            timer.end(timed, self.main)
        pending.timed = timer, timed

    def _enqueue_parts(self, pending: StepOnDevice) -> None:
        step, buffers = pending.step, pending.buffers
        packed = self._pack(pending)
        if packed is not None:
            self.main.copy_to_device(self._inputs, buffers.inputs, packed.num_bytes)
        if len(step.copies):
            self._copy_pages(step.copies, buffers)
        if packed is not None:
            if (masks := step.masks) is not None and self._before is not None:
                masks.wait_for_step_before = self._before.synchronize
            self._compute(packed, pending.graph_key)
            if num_bytes := packed.result_shape.num_bytes:
                self.main.copy_to_host(buffers.results, self._results, num_bytes)

    def _pack(self, pending: StepOnDevice) -> PackedStep | None:
        """Pack a step's inputs; None if it computes nothing."""
        step, inputs = pending.step, pending.buffers.inputs
        if pending.padding is not None:
            size, variant = pending.padding
            packed = self._model.pack_padding(inputs, size, variant)
        elif step.batch is not None:
            size = self._graphs.size_for(step)
            packed = self._model.pack(step, inputs, size)
        else:
            return None
        pending.packed = packed
        pending.graph_key = None if size is None else GraphKey(size, packed.variant)
        return packed

    def _copy_pages(self, copies: npt.NDArray[np.int32], buffers: Buffers) -> None:
        num_bytes = copies.nbytes
        if len(buffers.copies.array) < num_bytes:
            buffers.copies = self.device.host_memory(2 * num_bytes)
        buffers.copies.array[:num_bytes] = copies.reshape(-1).view(np.uint8)
        if reads_any_of(copies, self._written_by_running(), self._model.page_size):
            self.main.record(buffers.before)
            self._copies.wait(buffers.before)
        try:
            with self._copies.current():
                self._model.copy_pages(buffers.copies, len(copies))
        finally:
            self._copies.record(buffers.copied)
            self.main.wait(buffers.copied)

    def _written_by_running(self) -> list[Locations]:
        batches = [pending.step.batch for pending in list(self._running)]
        return [batch.token_locations for batch in batches if batch is not None]

    def _compute(self, packed: PackedStep, key: GraphKey | None) -> None:
        graph = None if key is None else self._graphs.get(key)
        try:
            if graph is not None:
                graph.replay()
            else:
                packed.enqueue(self._inputs, self._results)
            packed.finish(self._inputs, self._results)
        except Exception as error:
            reason = self.device.meaning_of(error)
            if not isinstance(reason, OutOfDeviceMemoryError):
                raise
            logger.warning(
                "%s: %s; what was kept for later is given back, and the step enqueued once more",
                self.device.name,
                reason,
            )
            self.device.free_cached_memory()
            packed.enqueue(self._inputs, self._results)
            packed.finish(self._inputs, self._results)


def _nothing(step: int, copies: npt.NDArray[np.int32] = NO_COPIES) -> StepArrays:
    return StepArrays(step, copies, None, SampleRows.none())


def reads_any_of(
    copies: npt.NDArray[np.int32], locations: Sequence[Locations], page_size: int
) -> bool:
    """True if a device page that is copied from holds any of the locations.

    Locations count tokens from the start of the cache.
    """
    sources = copies[copies[:, 0] == 0, 1]
    return any(np.isin(sources, full_pages(written, page_size)).any() for written in locations)
