"""Hardware by name, and several devices as one."""

from __future__ import annotations

import pytest

from aioserve.capacity.hardware import PRESETS, Hardware, hardware_preset
from aioserve.errors import ConfigError


def test_several_devices_share_a_step() -> None:
    four = Hardware("machine", 1e6, 1e6, 10**9, 0.5).times(4)
    assert (four.flops_per_second, four.bytes_per_second) == (4e6, 4e6)
    assert (four.memory_bytes, four.step_seconds, four.num_devices) == (4 * 10**9, 0.5, 4)
    with pytest.raises(ConfigError, match="num_devices must be at least 1, got 0"):
        four.times(0)


def test_presets_are_found_by_name() -> None:
    assert hardware_preset("h100").memory_bytes == 80 * 10**9
    with pytest.raises(ConfigError, match=f"no hardware 'tpu'; there are: {', '.join(PRESETS)}"):
        hardware_preset("tpu")
