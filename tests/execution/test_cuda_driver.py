"""Reports of NVIDIA's driver about GPUs, from a library that answers as documented."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from aioserve.execution.cuda_driver import Card, DriverError, find_driver

CARDS = [
    Card("NVIDIA H200", 141 << 30, (9, 0)),
    Card("Tesla T4", 15 << 30, (7, 5)),
]


class FakeLibrary:
    """Used functions of libcuda; `failing` names a function and its status."""

    def __init__(self, *cards: Card, version: int = 13000, failing: dict[str, int] | None = None):
        self.cards = cards
        self.version = version
        self.failing = failing or {}

    def __getattr__(self, name: str) -> Any:
        if name in self.failing:
            return lambda *_: self.failing[name]
        answer = getattr(self, f"_{name}")

        def call(*arguments: Any) -> int:
            answer(*arguments)
            return 0

        return call

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDriverGetVersion(self, version: Any) -> None:
        _set(version, self.version)

    def _cuDeviceGetCount(self, count: Any) -> None:
        _set(count, len(self.cards))

    def _cuDeviceGet(self, device: Any, index: int) -> None:
        _set(device, 40 + index)  # a handle is no index

    def _cuDeviceGetName(self, name: Any, size: int, device: Any) -> None:
        name.value = self._card(device).name.encode()[: size - 1]

    def _cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> None:
        _set(memory, self._card(device).memory_bytes)

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        _set(value, self._card(device).capability[{75: 0, 76: 1}[attribute]])

    def _card(self, device: Any) -> Card:
        return self.cards[device.value - 40]


def _set(reference: Any, value: int) -> None:
    reference._obj.value = value


def test_cards_are_told_by_name_memory_and_capability() -> None:
    driver = find_driver(lambda name: FakeLibrary(*CARDS, version=12080))
    assert driver is not None
    assert driver.cuda_version == (12, 8)
    assert driver.cards == tuple(CARDS)


def test_without_a_driver_there_is_none() -> None:
    def load(name: str) -> ctypes.CDLL:
        assert name == "libcuda.so.1"
        raise OSError(name)

    assert find_driver(load) is None


def test_a_driver_without_a_card_that_may_be_used_has_none() -> None:
    driver = find_driver(lambda _: FakeLibrary(failing={"cuInit": 100, "cuDeviceGetCount": 3}))
    assert driver is not None
    assert driver.cards == ()
    assert driver.cuda_version == (13, 0)


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGetCount", "cuDeviceTotalMem_v2"])
def test_a_call_that_fails_is_named_with_its_number(function: str) -> None:
    failed = f"^{function} of libcuda.so.1 failed with CUDA error 999$"
    with pytest.raises(DriverError, match=failed):
        find_driver(lambda _: FakeLibrary(*CARDS, failing={function: 999}))
