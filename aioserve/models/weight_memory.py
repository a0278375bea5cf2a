"""Layout of a model's weights in memory, and the bytes that each format takes there.

`WeightReading` follows a `WeightLayout`. Loaded kernels tell their own bytes. Before that, a kernel
of one row is made to predict them, so that only kernels know how they keep weights. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from aioserve import _native
from aioserve.models import architecture
from aioserve.models.architecture import Tensor, parts_of
from aioserve.models.config import DecoderConfig
from aioserve.models.decoding import ARRAY_DTYPES, Decoding
from aioserve.models.stored import StoredLinear, StoredWeights, same_bits

__all__ = [
    "ExpectedKernels",
    "FormatMemory",
    "KernelBytes",
    "WeightLayout",
    "WeightMemory",
    "bytes_of_kernel",
    "weight_memory",
]

KernelBytes = Callable[[architecture.Linear], Sequence[tuple[int, int]]]
"""Function from a linear layer to (outputs, bytes) of each of its kernels, in row order."""

TWO_COPIES_BYTES = 64 << 20
"""Largest embedding kept twice, as a table and packed, if it is also the output layer.

A larger one is kept packed only. Reading rows of packed weights is slower, which shows in small
models."""


class WeightLayout(msgspec.Struct, frozen=True):
    """Division of a model's weights into arrays and linear layers."""

    embedding: Tensor
    head: architecture.Linear
    """Output layer."""
    has_table: bool
    """True if the embedding is an array; False: its rows are read from the head."""
    arrays: tuple[Tensor, ...]
    """Tensors that are arrays on every backend."""
    linears: tuple[architecture.Linear, ...]
    """Linear layers, the head first."""
    experts: frozenset[Tensor]
    """Tensors of experts, without those of shared MLPs."""

    @classmethod
    def of(cls, config: DecoderConfig, stored: StoredWeights, dtype: str) -> WeightLayout:
        """Return the layout of weights whose floats are held in `dtype`.

        If a tied head is stored as well, this reads it and the embedding to compare them.
        """
        head, has_table = architecture.Linear((config.head,)), True
        if config.head not in stored or _head_is_stored_twice(config, stored):
            head = architecture.Linear((config.embedding,))
            values = config.embedding.rows * config.embedding.columns
            has_table = values * ARRAY_DTYPES[dtype].itemsize <= TWO_COPIES_BYTES
        linears = (head, *config.linears)
        in_linears = {tensor for described in linears for tensor in parts_of(described, Tensor)}
        arrays = [config.embedding] if has_table else []
        arrays += [tensor for tensor in config.required if tensor not in in_linears]
        mixtures = parts_of(config.layers, architecture.Experts)
        experts = frozenset(parts_of(tuple(one.experts for one in mixtures), Tensor))
        arrays = list(dict.fromkeys(arrays))
        return cls(config.embedding, head, has_table, tuple(arrays), linears, experts)


def _head_is_stored_twice(config: DecoderConfig, stored: StoredWeights) -> bool:
    """True if a tied head is stored too, with the same bits as the embedding.

    If they differ, the stored head is used in spite of config.json, as in transformers."""
    return config.tie_word_embeddings and same_bits(stored[config.head], stored[config.embedding])


class FormatMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one format, either stored in it or rounded to it while they were read."""

    format: str
    tensors: int
    parameters: int
    """Number of elements of the tensors, by their decoded shapes."""
    file_bytes: int
    held_bytes: int
    """Bytes in memory. An embedding may be held twice."""


class WeightMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a model's weights."""

    formats: tuple[FormatMemory, ...]
    """Formats, ordered from most to fewest bytes in memory."""
    step_bytes: int
    """Bytes that a step reads: all except the embedding's table, which is only looked up."""
    expert_bytes: int = 0
    """Bytes of `step_bytes` that belong to experts. A step may need only some of them."""

    @property
    def held_bytes(self) -> int:
        return sum(one.held_bytes for one in self.formats)

    def by_format(self) -> dict[str, int]:
        """Bytes in memory by name of the format."""
        return {one.format: one.held_bytes for one in self.formats}


class _Counted:
    """Running sums of a format."""

    def __init__(self) -> None:
        self.tensors = self.parameters = self.file_bytes = self.held_bytes = 0


def weight_memory(
    layout: WeightLayout, stored: StoredWeights, dtype: str, kernels: KernelBytes | None
) -> WeightMemory:
    """Sum up the memory of weights whose floats are held in `dtype`.

    Linear layers are held as `kernels`, or as arrays if that is None. A bias in a kernel counts
    towards the format of its weight."""
    counted: dict[str, _Counted] = {}
    seen: set[Tensor] = set()
    step_bytes = expert_bytes = 0

    def count(tensor: Tensor, held_bytes: int, *, is_table: bool = False) -> None:
        nonlocal step_bytes, expert_bytes
        one = stored[tensor]
        sums = counted.setdefault(one.format.title, _Counted())
        sums.held_bytes += held_bytes
        step_bytes += 0 if is_table else held_bytes
        expert_bytes += held_bytes if tensor in layout.experts else 0
        if tensor not in seen:
            seen.add(tensor)
            sums.tensors += 1
            sums.parameters += tensor.rows * tensor.columns
            sums.file_bytes += one.num_bytes

    def array_bytes(tensor: Tensor) -> int:
        held = "float32" if tensor.is_wide else dtype
        return tensor.rows * tensor.columns * ARRAY_DTYPES[held].itemsize

    multiplied = dict.fromkeys(
        t for described in layout.linears for t in parts_of(described, Tensor)
    )
    for tensor in layout.arrays:
        if kernels is not None or tensor not in multiplied:
            count(tensor, array_bytes(tensor), is_table=tensor == layout.embedding)
    if kernels is None:
        for tensor in multiplied:
            count(tensor, array_bytes(tensor))
    else:
        for described in layout.linears:
            for tensor, held_bytes in _shared(described, kernels(described)):
                count(tensor, held_bytes)
    formats = [
        FormatMemory(
            format=name,
            tensors=sums.tensors,
            parameters=sums.parameters,
            file_bytes=sums.file_bytes,
            held_bytes=sums.held_bytes,
        )
        for name, sums in counted.items()
    ]
    formats.sort(key=lambda one: -one.held_bytes)
    return WeightMemory(formats=tuple(formats), step_bytes=step_bytes, expert_bytes=expert_bytes)


def bytes_of_kernel(kernel: _native.LinearKernel) -> Sequence[tuple[int, int]]:
    """Return (outputs, bytes) of each kernel that `kernel` joins, or of `kernel` itself."""
    if isinstance(kernel, _native.JoinedKernel):
        return kernel.sizes
    return ((kernel.out_features, kernel.num_bytes),)


class ExpectedKernels:
    """Expected bytes of linear layers' kernels.

    It makes a one-row kernel of each format and width to find them."""

    def __init__(self, stored: StoredWeights, decoding: Decoding) -> None:
        self._stored = stored
        self._decoding = decoding
        self._row_bytes: dict[tuple[str, int, bool], int] = {}

    def __call__(self, described: architecture.Linear) -> Sequence[tuple[int, int]]:
        """Predict `bytes_of_kernel` of the layer. Reads single rows."""
        weights, biases = (
            [self._stored[tensor] for tensor in tensors]
            for tensors in (described.weights, described.biases)
        )
        kernels: list[tuple[int, int]] = []
        for run in self._decoding.runs(weights):
            outputs = sum(weight.out_features for weight in run)
            panels = -(-outputs // _native.PANEL_OUTPUTS)
            kernels.append((outputs, panels * self._panel_bytes(run[0], biases[:1])))
        return kernels

    def _panel_bytes(self, weight: StoredLinear, bias: Sequence[StoredLinear]) -> int:
        key = (weight.format.name, weight.in_features, bool(bias))
        if key not in self._row_bytes:
            row = self._decoding.kernel([weight.sliced(0, 1)], [one.sliced(0, 1) for one in bias])
            self._row_bytes[key] = row.num_bytes
        return self._row_bytes[key]


def _shared(
    described: architecture.Linear, kernels: Sequence[tuple[int, int]]
) -> Iterator[tuple[Tensor, int]]:
    """Yield each tensor of a layer with its share of the kernels' bytes, in proportion to rows.

    Biases get 0 bytes."""
    left = iter(kernels)
    outputs = num_bytes = top = given = 0
    for tensor in described.weights:
        if top == outputs:
            (outputs, num_bytes), top, given = next(left), 0, 0
        top += tensor.rows
        until = num_bytes * top // outputs
        yield tensor, until - given
        given = until
    for tensor in described.biases:
        yield tensor, 0
