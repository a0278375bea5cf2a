"""A GPU without hardware: streams that run at their own pace, events, and memory that notices
races.

    gpu = FakeGpu(seed=7)                     on a simulated loop: work takes virtual time
    worker = CudaWorker(gpu, model)
    runner = CudaRunner(host, worker, host_side=SimulatedHost(gpu), ...)
    ...
    assert not gpu.violations

Work on one stream is done in order, each piece after a random while. Between streams only events
make an order. Each piece knows all work that is certain to have come before it. This is the work of
its stream, of events that the stream waited for, and all that the host knew when the piece was
enqueued.

Suppose a piece touches memory that another stream wrote, or writes memory that another one read. If
that access isn't certain to have come before, this is a violation, whichever was first this time.

The host can break its side as well. A source in pinned memory must stay until it is copied, and a
target is poison until then.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.execution.gpu.device import HostMemory
from aioserve.execution.gpu.failures import DeviceFailedError, OutOfDeviceMemoryError
from aioserve.testing.fake_model import PlantedError
from tests.doubles.gpu_faults import GpuFault, GpuFaults
from tests.waits import LIMIT_SECONDS

__all__ = [
    "Access",
    "FakeEvent",
    "FakeGpu",
    "FakeMemory",
    "FakePinned",
    "FakeStream",
]

POISON = 0xA5
MAX_STREAMS = 8
KEPT_VIOLATIONS = 20
KEPT_HISTORY = 256
Kernel = Callable[["Access"], None]
Touches = dict[int, npt.NDArray[np.int64]]
Clock = list[int]
"""Number of pieces of work that are certain to be done, for each stream."""


class FakeGpu:
    """A `Device`. On a simulated loop it is made on that loop. Elsewhere `later(seconds, call)`
    makes calls on threads, and `synchronize` blocks."""

    name: str = "fake gpu"

    def __init__(
        self,
        *,
        seed: int = 0,
        faults: GpuFaults = GpuFaults(),  # noqa: B008
        op_seconds: float | Callable[[str], float] = 0.002,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        """`op_seconds` is the longest time of a piece of work, or returns the time for a name."""
        self.violations: list[str] = []
        """Accesses without an order, and memory changed too early."""
        self.failure: str | None = None
        """Message about what broke the device."""
        self.num_launches: int = 0
        self.num_replays: int = 0
        self.num_captures: int = 0
        self.num_synchronized: int = 0
        """Calls of `synchronize`, which never waits: all work is on the streams of a runner."""
        self.num_frees: int = 0
        """Calls of `free_cached_memory`."""
        self.known: Clock = [0] * MAX_STREAMS
        """Work that the host knows to be done."""
        self.changed: threading.Condition = threading.Condition(threading.RLock())
        self.may_block: bool = later is not None
        self.later: Callable[[float, Callable[[], None]], object] = (
            later or asyncio.get_running_loop().call_later
        )
        self.clock: Callable[[], float] = (
            time.monotonic if self.may_block else asyncio.get_running_loop().time
        )
        self.source: random.Random = random.Random(seed)
        self.history: deque[str] = deque(maxlen=KEPT_HISTORY)
        """Names of the pieces of work that were done last."""
        self.captured: list[Kernel] | None = None
        """Kernels launched while a graph is captured."""
        self.on_failure: list[Callable[[], None]] = []
        self._op_seconds = op_seconds
        self._faults = faults
        self._num_streams = 0
        self._streams = threading.local()

    # -- as a device

    @contextmanager
    def within(self) -> Iterator[None]:
        yield

    def new_stream(self) -> FakeStream:
        self._num_streams += 1
        return FakeStream(self, self._num_streams - 1)

    def new_event(self, *, timed: bool = False) -> FakeEvent:
        return FakeEvent(self, timed=timed)

    def seconds_between(self, earlier: Any, later: Any) -> float:
        return later.seconds - earlier.seconds

    def memory(self, num_bytes: int) -> FakeMemory:
        return FakeMemory(f"{num_bytes} bytes", np.full(num_bytes, POISON, np.uint8), unit=8)

    def host_memory(self, num_bytes: int) -> FakePinned:
        return FakePinned(np.full(num_bytes, POISON, np.uint8))

    def capture(self, enqueue: Callable[[], None]) -> FakeGraph:
        self.check()
        self.num_captures += 1
        self.captured = []
        try:
            enqueue()
            if self.num_captures - 1 in self._faults.uncapturable:
                raise PlantedError(f"capture {self.num_captures - 1}")
            return FakeGraph(self, self.captured)
        finally:
            self.captured = None

    def synchronize(self) -> None:
        self.check()
        self.num_synchronized += 1

    def free_cached_memory(self) -> None:
        self.check()
        self.num_frees += 1

    def meaning_of(self, error: Exception) -> Exception:
        if self.failure is not None:
            return DeviceFailedError(f"{self.name}: {self.failure}").with_cause(error)
        if isinstance(error, MemoryError):
            return OutOfDeviceMemoryError(f"{self.name}: {error}").with_cause(error)
        return error

    # -- for its parts, and for models

    @property
    def current_stream(self) -> FakeStream:
        """The stream that this thread launches on."""
        return self.stack[-1]

    @property
    def stack(self) -> list[FakeStream]:
        if not hasattr(self._streams, "stack"):
            self._streams.stack = []
        return self._streams.stack

    def check(self) -> None:
        """Raise if the device is broken, as every call then does."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def draw_fault(self, name: str) -> GpuFault | None:
        """Draw a fault for the launch of a kernel, and count it."""
        launch = self.num_launches
        self.num_launches += 1
        fault = self._faults.draw(launch, self.source)
        if fault is GpuFault.OUT_OF_MEMORY:
            raise MemoryError(f"launch {launch}, {name}")
        if fault is GpuFault.RAISES:
            raise PlantedError(f"launch {launch}, {name}")
        return fault

    def seconds_of(self, name: str) -> float:
        """Seconds that a piece of work takes."""
        if callable(self._op_seconds):
            return self._op_seconds(name)
        return self.source.uniform(0.0, self._op_seconds)

    def break_for_good(self, why: str) -> None:
        """Break the device: from here on nothing is done, and every call fails."""
        with self.changed:
            if self.failure is None:
                self.failure = why
            self.changed.notify_all()
        calls, self.on_failure = self.on_failure, []
        for call in calls:
            call()

    def violate(self, what: str) -> None:
        if len(self.violations) < KEPT_VIOLATIONS:
            self.violations.append(what)


class FakeMemory:
    """Memory of the device: one-dimensional, with a record of the last access of each stream.

    Elements are told apart in groups of `unit`.
    """

    def __init__(self, name: str, array: npt.NDArray[Any], *, unit: int = 1) -> None:
        self.name = name
        self.array = array
        self.unit = unit
        self.reads: Touches = {}
        """Maps a stream to the number of its last piece of work that read each unit."""
        self.writes: Touches = {}

    def note(self, touches: Touches, stream: int, cells: Any, at: int) -> None:
        """Note that a stream's piece of work numbered `at` touched these units."""
        if stream not in touches:
            touches[stream] = np.zeros(-(-len(self.array) // self.unit), np.int64)
        touches[stream][cells] = at


class FakePinned(msgspec.Struct):
    """Pinned memory of the host."""

    array: npt.NDArray[np.uint8]


class Access:
    """Access of a kernel to memory. `where` counts elements: a slice, or an array."""

    def __init__(
        self, gpu: FakeGpu, stream: int, name: str, clock: Clock, fault: GpuFault | None
    ) -> None:
        self.fault = fault
        self.source: random.Random = gpu.source
        self._gpu = gpu
        self._stream = stream
        self._name = name
        self._clock = clock

    def read(self, memory: FakeMemory, where: Any) -> npt.NDArray[Any]:
        cells = _cells(memory, where)
        self._check(memory, memory.writes, cells, "reads", "wrote")
        memory.note(memory.reads, self._stream, cells, self._clock[self._stream])
        return memory.array[where].copy()

    def write(self, memory: FakeMemory, where: Any, values: Any) -> None:
        cells = _cells(memory, where)
        self._check(memory, memory.writes, cells, "writes", "wrote")
        self._check(memory, memory.reads, cells, "writes", "read")
        memory.note(memory.writes, self._stream, cells, self._clock[self._stream])
        memory.array[where] = values

    def _check(
        self,
        memory: FakeMemory,
        touches: Touches,
        cells: Any,
        does: str,
        did: str,
    ) -> None:
        for stream, last in touches.items():
            if stream != self._stream and (last[cells] > self._clock[stream]).any():
                self._gpu.violate(
                    f"{self._name} on stream {self._stream} {does} {memory.name}, which stream "
                    f"{stream} {did} with nothing to say which comes first"
                )


def _cells(memory: FakeMemory, where: Any) -> Any:
    if isinstance(where, slice):
        return slice(where.start // memory.unit, -(-where.stop // memory.unit))
    if len(where) and int(where.min()) < 0:
        raise IndexError(f"{memory.name} has no place {int(where.min())}")
    return where // memory.unit


class FakeEvent:
    def __init__(self, gpu: FakeGpu, *, timed: bool = False) -> None:
        self.mark: _Mark | None = None
        self._gpu = gpu
        self._timed = timed

    @property
    def seconds(self) -> float:
        """Time when it was done. Raises unless it is done, and is timed."""
        mark = self.mark
        if not self._timed or mark is None or not mark.done:
            raise RuntimeError("the time of an event that isn't timed, or isn't done")
        return mark.seconds

    @property
    def is_done(self) -> bool:
        gpu = self._gpu
        with gpu.changed:
            gpu.check()
            done = self.mark is None or self.mark.done
            if done and self.mark is not None:
                _merge(gpu.known, self.mark.clock)
        return done

    def synchronize(self) -> None:
        gpu, mark = self._gpu, self.mark
        with gpu.changed:
            if gpu.may_block:
                gpu.changed.wait_for(
                    lambda: mark is None or mark.done or gpu.failure is not None,
                    timeout=LIMIT_SECONDS,
                )
            if not self.is_done:
                raise AssertionError("the host would wait here, where nothing else goes on")

    def spin(self, seconds: float) -> bool:
        return self.is_done


class _Mark:
    """One recording of an event."""

    def __init__(self) -> None:
        self.done = False
        self.seconds: float = 0.0
        """Time when it was done."""
        self.clock: Clock = []
        self.when_done: list[Callable[[], None]] = []


class _Work(msgspec.Struct):
    """A piece of a stream's work. Without a kernel it takes no time."""

    name: str
    known: Clock
    run: Kernel | None = None
    after: _Mark | None = None
    mark: _Mark | None = None
    fault: GpuFault | None = None


class FakeStream:
    def __init__(self, gpu: FakeGpu, number: int) -> None:
        self._gpu = gpu
        self._number = number
        self._work: deque[_Work] = deque()
        self._clock: Clock = [0] * MAX_STREAMS
        self._busy = False

    @contextmanager
    def current(self) -> Iterator[None]:
        self._gpu.stack.append(self)
        try:
            yield
        finally:
            self._gpu.stack.pop()

    def copy_to_device(self, target: FakeMemory, source: HostMemory, num_bytes: int) -> None:
        gpu, expected = self._gpu, source.array[:num_bytes].copy()

        def copy(access: Access) -> None:
            if not np.array_equal(source.array[:num_bytes], expected):
                gpu.violate("pinned memory was written before it was copied to the device")
            access.write(target, slice(0, num_bytes), source.array[:num_bytes])

        self._enqueue("a copy to the device", copy)

    def copy_to_host(self, target: HostMemory, source: FakeMemory, num_bytes: int) -> None:
        target.array[:num_bytes] = POISON

        def copy(access: Access) -> None:
            target.array[:num_bytes] = access.read(source, slice(0, num_bytes))

        self._enqueue("a copy to the host", copy)

    def launch(self, name: str, kernel: Kernel) -> None:
        """Run a kernel, or capture it."""
        gpu = self._gpu
        gpu.check()
        if gpu.captured is not None:
            gpu.captured.append(kernel)
        else:
            self._enqueue(name, kernel, fault=gpu.draw_fault(name))

    def record(self, event: Any) -> None:
        event.mark = _Mark()
        self._enqueue("an event", None, mark=event.mark)

    def wait(self, event: Any) -> None:
        self._enqueue("a wait", None, after=event.mark)

    def call_host(self, function: int, argument: int) -> None:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._enqueue("a call of the host", lambda access: call(argument))

    def _enqueue(self, name: str, run: Kernel | None, **parts: Any) -> None:
        gpu = self._gpu
        with gpu.changed:
            gpu.check()
            if gpu.captured is not None:
                raise RuntimeError(f"{name} can't be captured")
            self._work.append(_Work(name, list(gpu.known), run, **parts))
            self._go_on()

    def _go_on(self) -> None:
        """Begin the next piece of work, if possible."""
        gpu = self._gpu
        while self._work and not self._busy and gpu.failure is None:
            work = self._work[0]
            if work.after is not None and not work.after.done:
                self._busy = True
                work.after.when_done.append(self._wake)
            elif work.fault is GpuFault.HANGS:
                self._busy = True
            elif work.run is None:
                self._do()
            else:
                self._busy = True
                gpu.later(gpu.seconds_of(work.name), self._run)

    def _wake(self) -> None:
        self._busy = False
        self._go_on()

    def _run(self) -> None:
        with self._gpu.changed:
            if self._gpu.failure is None:
                self._do()
                self._busy = False
                self._go_on()

    def _do(self) -> None:
        """Do the first piece of work now."""
        gpu, work, clock = self._gpu, self._work.popleft(), self._clock
        _merge(clock, work.known)
        if work.after is not None:
            _merge(clock, work.after.clock)
        clock[self._number] += 1
        if work.fault is GpuFault.BREAKS:
            gpu.break_for_good(f"{work.name} made an illegal access, as planted")
            return
        if work.run is not None:
            access = Access(gpu, self._number, work.name, list(clock), work.fault)
            try:
                work.run(access)
            except Exception as error:
                gpu.violate(f"{work.name}: {error!r}")
                gpu.break_for_good(f"{work.name} made an illegal access: {error!r}")
                return
            gpu.history.append(work.name)
        if work.mark is not None:
            work.mark.clock = list(clock)
            work.mark.done = True
            work.mark.seconds = gpu.clock()
            gpu.changed.notify_all()
            for call in work.mark.when_done:
                call()


class FakeGraph:
    def __init__(self, gpu: FakeGpu, kernels: list[Kernel]) -> None:
        self._gpu = gpu
        self._kernels = kernels

    def replay(self) -> None:
        def run(access: Access) -> None:
            for kernel in self._kernels:
                kernel(access)

        self._gpu.current_stream.launch("a graph", run)
        self._gpu.num_replays += 1


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in enumerate(other):
        clock[stream] = max(clock[stream], count)
