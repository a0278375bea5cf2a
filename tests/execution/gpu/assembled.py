"""Loads a directory as an engine with a CUDA device would, onto a device that tests can look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aioserve.config import EngineConfig
from aioserve.execution.gpu.memory import MemoryCounts
from aioserve.execution.gpu.waiting import HostSide
from aioserve.execution.loading.cuda import CudaPlacement
from aioserve.execution.loading.place import place_model
from aioserve.execution.runner import LoadedModel, Text
from aioserve.models.files import model_files
from aioserve.models.reading import WeightReading
from aioserve.ops.gpu.backend import CudaBackend
from tests.execution.gpu.host_device import HostCounts, HostDevice

__all__ = ["Assembled", "on_host"]


class Assembled:
    """A `ModelSource`. Its `device` counts `captured` and `replays`; `captures` has the reported
    progress of captures."""

    def __init__(
        self,
        path: Path,
        device: Any,
        backend: CudaBackend,
        memory: MemoryCounts,
        host_side: HostSide | None = None,
    ) -> None:
        self.path = path
        self.device = device
        self.backend = backend
        self.memory = memory
        self.host_side = host_side
        self.captures: list[tuple[int, int]] = []
        self.num_slots = 0

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        self.num_slots = num_slots
        placement = CudaPlacement(self.device, self.backend, self.memory, self.host_side)
        with WeightReading(
            model_files(self.path),
            dtype=config.dtype,
            formats=self.backend.formats,
            quantization=config.quantization,
        ) as reading:
            weights = reading.read()
        return await place_model(
            "tiny",
            placement.load(weights, config),
            Text(None, None, "ids are enough"),
            config,
            placement,
            num_slots=num_slots,
            seconds={},
            progress=lambda done, total: self.captures.append((done, total)),
        )


def on_host(
    path: Path, memory: HostCounts | None = None, host_side: HostSide | None = None
) -> Assembled:
    """Make one on a device that is the host."""
    counts = memory or HostCounts(1 << 30, 1 << 20, 1 << 20)
    return Assembled(path, HostDevice(), CudaBackend("cpu"), counts, host_side)
