"""The device of CuPy and torch, as far as it can be tested without a GPU."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch

from aioserve.errors import ConfigError
from aioserve.execution.gpu import cupy_device
from aioserve.execution.gpu.cupy_device import CupyDevice
from aioserve.execution.gpu.failures import (
    DeviceFailedError,
    OutOfDeviceMemoryError,
)


class CUDARuntimeError(RuntimeError):
    """An error with its number, like CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class CupyOutOfMemoryError(MemoryError):
    """An error like that of CuPy's memory pool."""


def fake_cupy(*, available: bool = True, status: int = 0) -> Any:
    """Make the part of CuPy that reports the state of a device."""
    runtime = types.SimpleNamespace(
        streamQuery=lambda pointer: status, CUDARuntimeError=CUDARuntimeError
    )
    memory = types.SimpleNamespace(OutOfMemoryError=CupyOutOfMemoryError)
    cuda = types.SimpleNamespace(is_available=lambda: available, runtime=runtime, memory=memory)
    return types.SimpleNamespace(cuda=cuda)


def use(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    def imported(name: str) -> Any:
        if isinstance(cupy, Exception):
            raise cupy
        return cupy

    monkeypatch.setattr(importlib, "import_module", imported)


@pytest.mark.parametrize("error", [ImportError("No module"), OSError("libnvrtc.so")])
def test_without_cupy_the_error_says_what_to_install(monkeypatch, error):
    use(monkeypatch, error)
    with pytest.raises(ConfigError, match=r"aioserve\[cuda12\].*aioserve\[cuda13\]") as caught:
        CupyDevice(0)
    assert str(error) in str(caught.value)


def test_without_a_gpu_the_error_says_who_finds_none(monkeypatch):
    use(monkeypatch, fake_cupy(available=False))
    with pytest.raises(ConfigError, match="CuPy finds no GPU"):
        CupyDevice(0)
    use(monkeypatch, fake_cupy())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch .* finds no GPU"):
        CupyDevice(0)


def device(status: int) -> CupyDevice:
    made = object.__new__(CupyDevice)
    made.name = "cuda:0 (a card)"
    made._cupy = fake_cupy(status=status)
    made._probe = types.SimpleNamespace(ptr=0)
    return made


@pytest.mark.parametrize(
    ("status", "error", "meaning"),
    [
        (0, torch.OutOfMemoryError("CUDA out of memory.\nadvice"), OutOfDeviceMemoryError),
        (600, CUDARuntimeError(2), OutOfDeviceMemoryError),
        (0, CupyOutOfMemoryError("no memory"), OutOfDeviceMemoryError),
        (700, RuntimeError("an illegal memory access\nadvice"), DeviceFailedError),
        (719, torch.OutOfMemoryError("CUDA out of memory."), DeviceFailedError),
        (0, ValueError("max_context"), ValueError),
        (0, CUDARuntimeError(1), CUDARuntimeError),
    ],
)
def test_what_an_error_means_is_for_the_device_to_say(status, error, meaning):
    found = device(status).meaning_of(error)
    assert type(found) is meaning
    if meaning in (OutOfDeviceMemoryError, DeviceFailedError):
        assert str(found).startswith("cuda:0 (a card): ")
        assert "advice" not in str(found)
        assert found.__cause__ is error
    else:
        assert found is error


def test_an_address_of_the_driver_is_that_of_its_function(monkeypatch):
    libc = cupy_device.ctypes.CDLL(None)
    monkeypatch.setattr(cupy_device, "_driver", lambda: libc)
    cupy_device._address.cache_clear()
    try:
        abs_at = cupy_device._address("abs")
        called = cupy_device.ctypes.CFUNCTYPE(cupy_device.ctypes.c_int, cupy_device.ctypes.c_int)(
            abs_at
        )
        assert called(-3) == 3
    finally:
        cupy_device._address.cache_clear()


def test_events_note_the_time_only_where_they_are_to_be_timed() -> None:
    made, pairs = [], []

    def event(**options: bool) -> object:
        made.append(options)
        return types.SimpleNamespace(ptr=len(made))

    def elapsed(earlier: Any, later: Any) -> float:
        pairs.append((earlier.ptr, later.ptr))
        return 1500.0  # milliseconds

    timing = device(0)
    timing._cupy.cuda.Event = event
    timing._cupy.cuda.get_elapsed_time = elapsed
    first, second = timing.new_event(timed=True), timing.new_event(timed=True)
    timing.new_event()
    assert made == [{"block": True, "disable_timing": flag} for flag in (False, False, True)]
    assert timing.seconds_between(first, second) == 1.5
    assert pairs == [(1, 2)]
