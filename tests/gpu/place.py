"""The device of the tests in this folder: a GPU, or the host for a rehearsal.

`AIOSERVE_GPU_TESTS` decides what happens without a GPU. By default the tests are skipped. With
"required" they fail. With "rehearse", those that can run on the host do, with interpreted kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from aioserve.errors import ConfigError
from aioserve.execution.gpu.cupy_device import CupyDevice
from aioserve.execution.gpu.device import Graph
from aioserve.execution.gpu.memory import TorchMemory
from aioserve.execution.gpu.waiting import Threads, Way
from tests.execution.gpu.assembled import Assembled, on_host

__all__ = ["VARIABLE", "CountingCard", "Place", "is_rehearsal", "is_required", "why_no_card"]

VARIABLE = "AIOSERVE_GPU_TESTS"
CARD = 0


def wish() -> str:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "required", "rehearse"):
        raise ValueError(f"{VARIABLE} must be required or rehearse, or not set; got {value!r}")
    return value


def is_required() -> bool:
    return wish() == "required"


def is_rehearsal() -> bool:
    return wish() == "rehearse"


@cache
def why_no_card() -> str | None:
    """Reason why nothing can run on a GPU here; None if it can."""
    try:
        CupyDevice(CARD)
    except ConfigError as error:
        return str(error)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, and Triton interprets its kernels"
    return None


@dataclass(slots=True)
class CountedGraph:
    graph: Graph
    card: CountingCard

    def replay(self) -> None:
        self.graph.replay()
        self.card.replays += 1


class CountingCard(CupyDevice):
    """The GPU, with counts of graphs."""

    def __init__(self, index: int = CARD) -> None:
        super().__init__(index)
        self.captured = 0
        self.replays = 0

    def capture(self, enqueue: Callable[[], None]) -> Any:
        graph = super().capture(enqueue)
        self.captured += 1
        return CountedGraph(graph, self)


@dataclass(slots=True, frozen=True)
class Place:
    """A place to run on. `device` is torch's, for tensors."""

    is_card: bool
    device: torch.device

    @classmethod
    def found(cls) -> Place:
        if why_no_card() is None:
            return cls(True, torch.device("cuda", CARD))
        return cls(False, torch.device("cpu"))

    def assembled(self, path: Path, *, way: Way = "block", card: Any = None) -> Assembled:
        """Make a source that loads `path`, on a device of its own, or on `card`."""
        from aioserve.ops.gpu.backend import CudaBackend

        if not self.is_card:
            return on_host(path, host_side=Threads(way))
        backend, memory = CudaBackend(self.device), TorchMemory(self.device)
        return Assembled(path, card or CountingCard(), backend, memory, Threads(way))

    def size(self, on_card: int, rehearsed: int) -> int:
        """Choose an amount of work: interpreted kernels are slow."""
        return on_card if self.is_card else rehearsed
