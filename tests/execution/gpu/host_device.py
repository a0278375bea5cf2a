"""A device that is the host: torch on the CPU, and Triton's interpreter.

All enqueued work is done at once, so every event is done when it is recorded. The device drives the
real model of steps through the real runner. Its graphs are the captured calls. It can't show work
that is done too early or too late; `tests.doubles.fake_gpu` can.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aioserve.execution.gpu.device import Event, HostMemory
from aioserve.execution.gpu.failures import OutOfDeviceMemoryError
from aioserve.execution.gpu.memory import MemoryUse

__all__ = ["HostCounts", "HostDevice", "cuda_is_the_host"]


@dataclass
class HostBytes:
    array: npt.NDArray[np.uint8]


class HostEvent:
    is_done = True
    seconds = 0.0

    def synchronize(self) -> None:
        pass

    def spin(self, seconds: float) -> bool:
        return True


class HostStream:
    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy_to_device(self, target: torch.Tensor, source: HostMemory, num_bytes: int) -> None:
        target[:num_bytes] = torch.from_numpy(source.array[:num_bytes])

    def copy_to_host(self, target: HostMemory, source: torch.Tensor, num_bytes: int) -> None:
        target.array[:num_bytes] = source[:num_bytes].numpy()

    def record(self, event: Any) -> None:
        event.seconds = time.perf_counter()

    def wait(self, event: Event) -> None:
        pass

    def call_host(self, function: int, argument: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


@dataclass
class HostGraph:
    enqueue: Callable[[], None]
    device: HostDevice

    def replay(self) -> None:
        self.device.replays += 1
        self.enqueue()


class HostDevice:
    """The host as a device. Its memory holds junk at first, as a device's does."""

    name = "host"

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0

    def within(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def new_stream(self) -> HostStream:
        return HostStream()

    def new_event(self, *, timed: bool = False) -> HostEvent:
        return HostEvent()

    def seconds_between(self, earlier: Any, later: Any) -> float:
        return later.seconds - earlier.seconds

    def memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def host_memory(self, num_bytes: int) -> HostBytes:
        return HostBytes(np.full(num_bytes, 0x5A, np.uint8))

    def capture(self, enqueue: Callable[[], None]) -> HostGraph:
        self.captured += 1
        return HostGraph(enqueue, self)

    def synchronize(self) -> None:
        pass

    def free_cached_memory(self) -> None:
        pass

    def meaning_of(self, error: Exception) -> Exception:
        if isinstance(error, MemoryError):
            return OutOfDeviceMemoryError(str(error)).with_cause(error)
        return error


class HostCounts:
    """Memory counts of a device of `total` bytes: `taken` are in use, and the largest step took
    `step`."""

    def __init__(self, total: int, taken: int, step: int) -> None:
        self._use = MemoryUse(total=total, free=total - taken, held=taken, peak=taken + step)
        self.resets = 0

    def reset_peak(self) -> None:
        self.resets += 1

    def use(self) -> MemoryUse:
        return self._use


def cuda_is_the_host(patch: pytest.MonkeyPatch) -> HostDevice:
    """Make engines with any `device` load as on a GPU from now on, but run on this one."""
    # Imported here only, because a machine without Triton uses the rest of this file.
    from aioserve.execution.loading import target
    from aioserve.execution.loading.cuda import CudaPlacement
    from aioserve.ops.gpu.backend import CudaBackend

    device = HostDevice()
    memory = HostCounts(1 << 30, 1 << 20, 1 << 20)
    patch.setattr(target, "chosen_device", lambda config: "cuda:0")
    patch.setattr(
        CudaPlacement, "open", lambda name: CudaPlacement(device, CudaBackend("cpu"), memory)
    )
    return device
