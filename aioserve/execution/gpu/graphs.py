"""Decode steps as graphs: captured once at each of a few sizes, then launched by one call.

A decode of one token per sequence is hundreds of small kernels. The host takes longer to launch
them than the device to run them. A graph has fixed shapes, so a step is padded to the next captured
size. Padding is written to a page and a slot that are never read.

Graphs are captured largest first, since all take their memory from one pool: smaller ones fit into
what the largest left. Other sizes are captured when they are first needed. That step runs eagerly,
which also compiles kernels, and its graph is captured after it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from aioserve.config import EngineConfig
from aioserve.execution.gpu.device import Device, Graph
from aioserve.execution.step_arrays import StepArrays

__all__ = [
    "DecodeGraphs",
    "GraphKey",
    "default_graph_sizes",
    "graph_sizes",
    "is_decode",
    "max_sequences",
]

logger: logging.Logger = logging.getLogger(__name__)


def max_sequences(config: EngineConfig) -> int:
    """Return the most sequences of a step. Each draft token that it verifies counts as one more."""
    if config.speculation is None:
        return config.max_num_seqs
    most = config.max_num_seqs * (1 + config.speculation.max_tokens)
    return max(config.max_num_seqs, min(most, config.max_num_batched_tokens))


def default_graph_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return sizes up to `max_sequences`, which is included, so that steps are padded by few rows.

    1, 2, 4, then multiples of 8 up to 64, of 16 up to 256, of 64 up to 1,024, of 256 beyond.
    """
    sizes = [1, 2, 4]
    for stride, end in ((8, 64), (16, 256), (64, 1024), (256, max_sequences)):
        first = sizes[-1] // stride * stride + stride
        sizes += range(first, end + 1, stride)
    return (*[size for size in sizes if size < max_sequences], max_sequences)


def graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of sequences at which decodes are captured."""
    if config.graph_sizes is None:
        return default_graph_sizes(max_sequences(config))
    return tuple(config.graph_sizes)


def is_decode(step: StepArrays) -> bool:
    """True if each sequence has one token, and one sampled row of logits for it."""
    batch = step.batch
    if batch is None:
        return False
    size = len(batch.context_lens)
    if not len(batch.token_ids) == len(batch.logit_rows) == len(step.samples) == size:
        return False
    return bool(np.array_equal(batch.logit_rows, np.arange(size)))


class GraphKey(NamedTuple):
    """Properties that the steps of one graph share."""

    size: int
    """Number of sequences that the steps are padded to."""
    variant: Hashable
    """Variant of `PackedStep`."""


class DecodeGraphs:
    """The graphs of decode steps. For the thread that launches steps."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        """`sizes` are numbers of sequences. Without any, every step runs eagerly. Raises
        ValueError for a size below 1."""
        self.sizes: tuple[int, ...] = tuple(sorted(set(sizes)))
        if self.sizes and self.sizes[0] < 1:
            raise ValueError(f"graph sizes must be at least 1, got {self.sizes[0]}")
        self._device = device
        self._graphs: dict[GraphKey, Graph | None] = {}
        """Graphs by key; None if the capture failed."""

    def size_for(self, step: StepArrays) -> int | None:
        """Return the number of sequences that a step is padded to; None if it runs as it is."""
        size = len(step.samples)
        if not self.sizes or size > self.sizes[-1] or not is_decode(step):
            return None
        return self.sizes[bisect_left(self.sizes, size)]

    def get(self, key: GraphKey) -> Graph | None:
        """Return the graph of a key, if there is one by now."""
        return self._graphs.get(key)

    def is_missing(self, key: GraphKey) -> bool:
        """True if its capture hasn't been tried."""
        return key not in self._graphs

    def capture(self, key: GraphKey, enqueue: Callable[[], None]) -> None:
        """Make the graph of what `enqueue` launches, and has launched before.

        If the capture fails, these steps stay eager, and the log says so.
        """
        try:
            self._graphs[key] = self._device.capture(enqueue)
        except Exception as error:
            self._graphs[key] = None
            logger.warning(
                "%s: decodes of %d sequences run without a CUDA graph: it could not be captured: "
                "%s",
                self._device.name,
                key.size,
                self._device.meaning_of(error),
            )
