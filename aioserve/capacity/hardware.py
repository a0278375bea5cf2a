"""Speed and memory of hardware, as its makers state it: enough for a roofline, and no more."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.isolation import shown

__all__ = ["MAX_DEVICES", "MAX_MEMORY_BYTES", "PRESETS", "Hardware", "check", "hardware_preset"]

MAX_DEVICES = 65_536
MAX_MEMORY_BYTES = 1 << 60
MAX_RATE = 1e24


def check(name: str, value: Any, least: float, most: float) -> None:
    """Raise `ConfigError` unless `value` is a number from `least` to `most`.

    It must be an int if these are ints.
    """
    whole = type(least) is int
    if type(value) is not int and (whole or type(value) is not float or math.isnan(value)):
        raise ConfigError(f"{name} must be {'an int' if whole else 'a number'}, got {shown(value)}")
    if not least <= value <= most:
        limit = f"at least {least:g}" if value < least else f"at most {most:.15g}"
        raise ConfigError(f"{name} must be {limit}, got {shown(value)}")


class Hardware(msgspec.Struct, frozen=True):
    """One device, or several that share every step evenly.

    Raises `ConfigError` for a value that no device has.
    """

    name: str
    flops_per_second: float
    """Peak of dense bfloat16 matrix products."""
    bytes_per_second: float
    """Peak bandwidth of the device's memory."""
    memory_bytes: int
    step_seconds: float
    """Fixed cost of one step: planning, launching, sampling. In the presets an assumption."""
    compute_efficiency: float = 0.6
    """Part of the peak that matrix products reach. An assumption, like the next one."""
    bandwidth_efficiency: float = 0.8
    num_devices: int = 1
    host_bytes_per_second: float = 32e9
    """Peak bandwidth of the link to the host's memory, one way."""

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second", "host_bytes_per_second"):
            check(name, getattr(self, name), 1.0, MAX_RATE)
        for name in ("compute_efficiency", "bandwidth_efficiency"):
            check(name, getattr(self, name), 1e-6, 1.0)
        check("memory_bytes", self.memory_bytes, 1, MAX_MEMORY_BYTES)
        check("step_seconds", self.step_seconds, 0.0, 1e6)
        check("num_devices", self.num_devices, 1, MAX_DEVICES)

    def times(self, num_devices: int) -> Hardware:
        """Return hardware of `num_devices` such devices.

        The time in which they send each other data isn't counted. Raises `ConfigError` for fewer
        than one, and for more than `MAX_DEVICES`.
        """
        check("num_devices", num_devices, 1, MAX_DEVICES)
        return msgspec.structs.replace(
            self,
            flops_per_second=self.flops_per_second * num_devices,
            bytes_per_second=self.bytes_per_second * num_devices,
            memory_bytes=self.memory_bytes * num_devices,
            num_devices=self.num_devices * num_devices,
            host_bytes_per_second=self.host_bytes_per_second * num_devices,
        )


PRESETS = {
    hardware.name: hardware
    for hardware in (
        # NVIDIA H200 and H100 Tensor Core GPU datasheets, SXM; half of the rates with sparsity, and
        # half of what PCIe does both ways.
        Hardware("h200", 989e12, 4.8e12, 141 * 10**9, 1e-3, host_bytes_per_second=64e9),
        Hardware("h100", 989e12, 3.35e12, 80 * 10**9, 1e-3, host_bytes_per_second=64e9),
        # NVIDIA A100 80GB datasheet, SXM.
        Hardware("a100", 312e12, 2.039e12, 80 * 10**9, 1e-3),
        # NVIDIA L4 datasheet, half of the rate with sparsity.
        Hardware("l4", 121e12, 300e9, 24 * 10**9, 1e-3),
        # No datasheet: the order of magnitude of a few server cores with AVX-512.
        Hardware("cpu", 500e9, 40e9, 32 * 10**9, 5e-4),
    )
}


def hardware_preset(name: str) -> Hardware:
    """Return the preset of that name. Raises `ConfigError`, which lists the names, for
    another one.
    """
    if type(name) is not str or name not in PRESETS:
        raise ConfigError(f"no hardware {shown(name)}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
