"""An NVIDIA GPU: CuPy's streams and events, torch's memory and graphs.

torch computes on the streams that CuPy makes, so both see one order of work. torch owns all memory.
CuPy is an extra (`pip install aioserve[cuda12]` or `[cuda13]`), and everything else works without
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioserve import _native
from aioserve.errors import ConfigError
from aioserve.execution.gpu.failures import DeviceFailedError, OutOfDeviceMemoryError
from aioserve.ops.gpu.cupy_module import cupy_module

__all__ = ["CupyDevice", "CupyEvent", "CupyStream", "PinnedMemory"]

SUCCESS, MEMORY_ALLOCATION, NOT_READY = 0, 2, 600
"""Error numbers of CUDA, the same in `cudaError_t` and `CUresult`."""
TO_DEVICE, TO_HOST = 1, 2
"""Numbers of `cudaMemcpyKind`."""


def _usable_cupy() -> Any:
    cupy = cupy_module()
    if not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} finds no GPU: it needs a build for CUDA, and its driver"
        )
    return cupy


class CupyDevice:
    """The GPU with this index, among those that CUDA shows. Raises `ConfigError`."""

    def __init__(self, index: int = 0) -> None:
        self._cupy: Any = _usable_cupy()
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise ConfigError(f"there is no GPU {index}: CUDA shows {count}")
        self.index = index
        self.torch_device: torch.device = torch.device("cuda", index)
        self.name: str = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        self._pool: Any = None
        with self._cupy.cuda.Device(index):
            self._probe: Any = self._cupy.cuda.Stream(non_blocking=True)
        """Stream without any work. A query of it tells the state of the device."""

    @contextmanager
    def within(self) -> Iterator[None]:
        cupy_device = self._cupy.cuda.Device(self.index)
        with torch.cuda.device(self.index), cupy_device, torch.inference_mode():
            yield

    def new_stream(self) -> CupyStream:
        """Make a stream that doesn't wait for the default stream, which others in the process
        may use."""
        return CupyStream(self._cupy, self.index)

    def new_event(self, *, timed: bool = False) -> CupyEvent:
        """Make an event whose `synchronize` sleeps."""
        return CupyEvent(self._cupy, timed=timed)

    def seconds_between(self, earlier: Any, later: Any) -> float:
        return self._cupy.cuda.get_elapsed_time(earlier.event, later.event) / 1000

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate uint8 `[num_bytes]`."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise self.meaning_of(error) from error

    def host_memory(self, num_bytes: int) -> PinnedMemory:
        return PinnedMemory(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))

    def capture(self, enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture on a stream of this device. Work already on it goes on meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which first waits for the device and collects garbage, with the
        # interpreter's lock. Only calls of this thread may spoil the capture: meanwhile another
        # thread waits for events, and the rest of the process may use the GPU.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(Exception):  # the original error is the one to report
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def free_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def meaning_of(self, error: Exception) -> Exception:
        """Query the device to learn if it works. torch, CuPy and Triton each have their own
        errors for that."""
        runtime = self._cupy.cuda.runtime
        try:
            status = runtime.streamQuery(self._probe.ptr)
        except Exception as raised:
            return DeviceFailedError(f"{self.name}: {raised}").with_cause(error)
        if status not in (SUCCESS, NOT_READY):
            return DeviceFailedError(f"{self.name}: {_first_line(error)}").with_cause(error)
        if isinstance(error, torch.OutOfMemoryError | self._cupy.cuda.memory.OutOfMemoryError):
            return OutOfDeviceMemoryError(f"{self.name}: {_first_line(error)}").with_cause(error)
        if getattr(error, "status", None) == MEMORY_ALLOCATION:
            return OutOfDeviceMemoryError(f"{self.name}: {_first_line(error)}").with_cause(error)
        return error


def _first_line(error: Exception) -> str:
    """Return the first line of an error, as torch adds advice on debugging."""
    return next(iter(str(error).splitlines()), repr(error))


@dataclass(slots=True, frozen=True)
class PinnedMemory:
    tensor: torch.Tensor
    """Bytes on the host, uint8, pinned."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        return self.tensor.numpy()


class CupyEvent:
    def __init__(self, cupy: Any, *, timed: bool = False) -> None:
        self._runtime = cupy.cuda.runtime
        self.event: Any = cupy.cuda.Event(block=True, disable_timing=not timed)
        self._error: type[Exception] = cupy.cuda.runtime.CUDARuntimeError

    @property
    def is_done(self) -> bool:
        return self._is_done(self._runtime.eventQuery(self.event.ptr))

    def synchronize(self) -> None:
        self.event.synchronize()

    def spin(self, seconds: float) -> bool:
        return self._is_done(
            _native.spin_on_event(_address("cuEventQuery"), self.event.ptr, NOT_READY, seconds)
        )

    def _is_done(self, status: int) -> bool:
        if status not in (SUCCESS, NOT_READY):
            raise self._error(status)
        return status == SUCCESS


class CupyStream:
    def __init__(self, cupy: Any, index: int) -> None:
        self._runtime = cupy.cuda.runtime
        self.stream: Any = cupy.cuda.Stream(non_blocking=True)
        self.torch_stream: torch.cuda.Stream = torch.cuda.ExternalStream(
            self.stream.ptr, device=torch.device("cuda", index)
        )

    @contextmanager
    def current(self) -> Iterator[None]:
        with self.stream, torch.cuda.stream(self.torch_stream):
            yield

    def copy_to_device(self, target: torch.Tensor, source: Any, num_bytes: int) -> None:
        # By address: torch's copy would track the use of the pinned memory, which is never freed
        # while a step has it.
        pointers = target.data_ptr(), source.tensor.data_ptr()
        self._runtime.memcpyAsync(*pointers, num_bytes, TO_DEVICE, self.stream.ptr)

    def copy_to_host(self, target: Any, source: torch.Tensor, num_bytes: int) -> None:
        pointers = target.tensor.data_ptr(), source.data_ptr()
        self._runtime.memcpyAsync(*pointers, num_bytes, TO_HOST, self.stream.ptr)

    def record(self, event: Any) -> None:
        self.stream.record(event.event)

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.event)

    def call_host(self, function: int, argument: int) -> None:
        status = _driver().cuLaunchHostFunc(
            ctypes.c_void_p(self.stream.ptr), ctypes.c_void_p(function), ctypes.c_void_p(argument)
        )
        if status != SUCCESS:
            raise RuntimeError(f"cuLaunchHostFunc: CUDA error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    """Load the driver's library, which CuPy has loaded by then."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _address(function: str) -> int:
    address = ctypes.cast(getattr(_driver(), function), ctypes.c_void_p).value
    if address is None:
        raise RuntimeError(f"the driver has no {function}")
    return address
