"""What hardware can do, as its makers state it: enough for a roofline, and no more."""

from __future__ import annotations

import msgspec

from aioserve.errors import ConfigError

__all__ = ["PRESETS", "Hardware", "hardware_preset"]


class Hardware(msgspec.Struct, frozen=True):
    """One device, or several that share every step evenly."""

    name: str
    flops_per_second: float
    """Peak of dense bfloat16 matrix products."""
    bytes_per_second: float
    """Peak bandwidth of the device's memory."""
    memory_bytes: int
    step_seconds: float
    """Fixed cost of one step: planning, launching, sampling. In the presets an assumption."""
    compute_efficiency: float = 0.6
    """The part of the peak that matrix products reach. An assumption, like the next one."""
    bandwidth_efficiency: float = 0.8
    num_devices: int = 1

    def times(self, num_devices: int) -> Hardware:
        """So many of this device. What they tell each other is not counted.

        Raises `ConfigError` for fewer than one.
        """
        if num_devices < 1:
            raise ConfigError(f"num_devices must be at least 1, got {num_devices}")
        return msgspec.structs.replace(
            self,
            flops_per_second=self.flops_per_second * num_devices,
            bytes_per_second=self.bytes_per_second * num_devices,
            memory_bytes=self.memory_bytes * num_devices,
            num_devices=self.num_devices * num_devices,
        )


PRESETS = {
    hardware.name: hardware
    for hardware in (
        # NVIDIA H200 and H100 Tensor Core GPU datasheets, SXM; half of the rates with sparsity.
        Hardware("h200", 989e12, 4.8e12, 141 * 10**9, 1e-3),
        Hardware("h100", 989e12, 3.35e12, 80 * 10**9, 1e-3),
        # NVIDIA A100 80GB datasheet, SXM.
        Hardware("a100", 312e12, 2.039e12, 80 * 10**9, 1e-3),
        # NVIDIA L4 datasheet, half of the rate with sparsity.
        Hardware("l4", 121e12, 300e9, 24 * 10**9, 1e-3),
        # No datasheet: the order of magnitude of a few server cores with AVX-512.
        Hardware("cpu", 500e9, 40e9, 32 * 10**9, 5e-4),
    )
}


def hardware_preset(name: str) -> Hardware:
    """The preset of that name. Raises `ConfigError` listing the names there are."""
    if name not in PRESETS:
        raise ConfigError(f"no hardware {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
