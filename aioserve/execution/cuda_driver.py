"""Asks NVIDIA's driver about the GPUs in this machine. Imports neither torch nor CuPy.

It is used to choose a device before torch is imported, and by `aioserve doctor`. The calls follow
the documented signatures of the CUDA driver API.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import msgspec

__all__ = ["Card", "Driver", "DriverError", "find_driver"]

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: there is a driver, but no GPU that it may use."""
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""Numbers of CUdevice_attribute."""
NAME_BYTES = 256


class DriverError(RuntimeError):
    """The driver is installed but doesn't work."""


class Card(msgspec.Struct, frozen=True):
    """One GPU as the driver numbers it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """Compute capability; (9, 0) for an H100."""


class Driver(msgspec.Struct, frozen=True):
    """A working driver."""

    cuda_version: tuple[int, int]
    """Newest CUDA version that it supports."""
    cards: tuple[Card, ...]


def find_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver | None:
    """Find the driver; None if none is installed. Takes up to some seconds.

    Raises `DriverError`, with the call and its error number, if a call of the driver failed.
    """
    try:
        library = load(LIBRARY)
    except OSError:
        return None

    def call(function: str, *arguments: Any) -> None:
        status = getattr(library, function)(*arguments)
        if status != 0:
            raise DriverError(f"{function} of {LIBRARY} failed with CUDA error {status}")

    status = library.cuInit(0)
    if status not in (0, NO_DEVICE):
        raise DriverError(f"cuInit of {LIBRARY} failed with CUDA error {status}")
    version, count = ctypes.c_int(), ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    if status == 0:
        call("cuDeviceGetCount", ctypes.byref(count))
    cards = tuple(_card(call, index) for index in range(count.value))
    return Driver((version.value // 1000, version.value % 1000 // 10), cards)


def _card(call: Callable[..., None], index: int) -> Card:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(NAME_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetName", name, NAME_BYTES, device)
    call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    call("cuDeviceGetAttribute", ctypes.byref(major), CAPABILITY_MAJOR, device)
    call("cuDeviceGetAttribute", ctypes.byref(minor), CAPABILITY_MINOR, device)
    return Card(name.value.decode(errors="replace"), memory.value, (major.value, minor.value))
