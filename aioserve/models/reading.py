"""Reads the weights of a model directory into packed weights or plain arrays, not yet tensors.

No torch here, so that weights are read while torch is imported. Natively they are packed as they
are read, panel by panel on all of the pool's threads; `loader` makes a `Decoder` of the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve import _native
from aioserve.errors import ConfigError, ModelError, ModelNotFoundError, WeightsError
from aioserve.models import architecture
from aioserve.models.architecture import Tensor, tensors_of
from aioserve.models.checkpoint import Checkpoint
from aioserve.models.config import DecoderConfig

__all__ = ["Array", "ReadWeights", "ReportBytes", "WeightReading"]

Array = npt.NDArray[Any]
ReportBytes = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) as tensors are read, in ascending order."""

TWO_COPIES_BYTES = 64 << 20
"""An embedding that is the output layer too is kept once, packed, if it is larger than this. Rows
of packed weights are slower to read, which shows in small models."""

_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
}
"""Array dtype for the numbers of each: numpy has no bfloat16."""

_PACKED_DTYPES = ("float32", "bfloat16")


class ReadWeights:
    """The weights of one model in memory, each to be taken once.

    `dtype` is float32, bfloat16 or float16. Where `packed`, a linear layer's weight and bias are
    one `_native.PackedWeight`; else they are arrays. bfloat16 arrays have dtype int16.
    """

    def __init__(self, config: DecoderConfig, dtype: str, packed: bool, max_model_len: int) -> None:
        self.config = config
        self.dtype = dtype
        self.packed = packed
        self.max_model_len = max_model_len
        self.head: architecture.Linear = architecture.Linear((config.head,))
        """The output layer."""
        self.has_table: bool = True
        """Whether the embedding is there as an array: else its rows are those of the head."""
        self.linears: dict[architecture.Linear, _native.PackedWeight] = {}
        self.arrays: dict[Tensor, Array] = {}


class WeightReading(AbstractContextManager["WeightReading"]):
    """Checks the model in `directory`, and reads its weights when told to. A context manager, which
    keeps the files open.

    dtype: float32, bfloat16, float16 or "auto", which is the checkpoint's.
    packed: whether linear layers are wanted as the native ops compute them. These know no float16:
        a float16 checkpoint becomes float32, which holds its values exactly.
    max_model_len: longest context in tokens to be served; None: all the model has.
    memory_bytes: what the weights may take at most; None: anything.

    Raises as `load_model` does.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "auto",
        packed: bool,
        max_model_len: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        if not directory.is_dir():
            raise ModelNotFoundError(f"{directory}: no such directory")
        config = DecoderConfig.from_directory(directory)
        limit = config.max_position_embeddings
        length = limit if max_model_len is None else max_model_len
        if not 1 <= length <= limit:
            raise ConfigError(f"max_model_len must be in [1, {limit}] for this model, got {length}")
        self._checkpoint = Checkpoint(directory, config)
        try:
            chosen = _choose_dtype(dtype, config, self._checkpoint, packed)
            needed = self._checkpoint.total_values * _DTYPES[chosen].itemsize
            if memory_bytes is not None and needed > memory_bytes:
                raise ModelError(
                    f"{directory}: the weights take {needed} bytes in {chosen}, and there are "
                    f"{memory_bytes} bytes of memory"
                )
        except BaseException:
            self._checkpoint.close()
            raise
        self._weights = ReadWeights(config, chosen, packed, length)
        self._reader = _native.WeightReader(chosen)
        self._stored_bytes: list[int] = []
        """Stored bytes of the tensors that each entry of the reader reads for the first time."""
        self._counted: set[Tensor] = set()

    def __exit__(self, *error: object) -> None:
        self._checkpoint.close()

    def stop(self) -> None:
        """Let `read` end with WeightsError, soon, from any thread; before it begins as well."""
        self._reader.stop()

    def read(self, progress: ReportBytes | None = None) -> ReadWeights:
        """All weights; once. `progress` is called in this thread."""
        packed = self._plan()
        # Between two tensors the reading needs no lock of the interpreter's, for which it would
        # wait long beside a thread that imports.
        thread = threading.Thread(target=self._reader.run, name="aioserve-weights")
        thread.start()
        try:
            self._follow(progress)
        finally:
            self._reader.stop()
            thread.join()
        for described, number in packed.items():
            self._weights.linears[described] = self._reader.take(number)
        return self._weights

    def _follow(self, progress: ReportBytes | None) -> None:
        total_bytes, done, reported = self._checkpoint.total_bytes, 0, 0
        skipped_bytes = total_bytes - sum(self._stored_bytes)
        while done < len(self._stored_bytes):
            try:
                done = self._reader.wait(done)
            except RuntimeError as error:
                raise WeightsError(str(error)) from error
            read_bytes = skipped_bytes + sum(self._stored_bytes[:done])
            if progress is not None and read_bytes > reported:
                progress(read_bytes, total_bytes)
                reported = read_bytes

    # -- what is read, in the order of the computation

    def _plan(self) -> dict[architecture.Linear, int]:
        config, weights = self._weights.config, self._weights
        if config.head not in self._checkpoint or self._head_is_stored_twice():
            weights.head = architecture.Linear((config.embedding,))
            size = math.prod(config.embedding.shape) * _DTYPES[weights.dtype].itemsize
            weights.has_table = size <= TWO_COPIES_BYTES
        linears = [weights.head]
        vectors = [config.embedding] if weights.has_table else []
        for layer in config.layers:
            linears += (layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down)
        in_linears = {tensor for described in linears for tensor in tensors_of(described)}
        vectors += (tensor for tensor in config.required if tensor not in in_linears)
        packed: dict[architecture.Linear, int] = {}
        for tensor in vectors:
            self._add_array(tensor)
        for described in linears:
            if weights.packed:
                packed[described] = self._add_packed(described)
            else:
                for tensor in tensors_of(described):
                    self._add_array(tensor)
        return packed

    def _head_is_stored_twice(self) -> bool:
        """Whether the tied head is stored once more. If it differs from the embedding, the file is
        right and config.json isn't; transformers decides alike."""
        config = self._weights.config
        return config.tie_word_embeddings and self._checkpoint.same(config.head, config.embedding)

    def _add_array(self, tensor: Tensor) -> None:
        if tensor in self._weights.arrays:
            return
        array = np.empty(tensor.shape, _DTYPES[self._weights.dtype])
        self._weights.arrays[tensor] = array
        columns = math.prod(tensor.shape[1:])
        self._reader.add_plain([self._checkpoint.source(tensor)], columns, array.ctypes.data)
        self._count((tensor,))

    def _add_packed(self, described: architecture.Linear) -> int:
        source = self._checkpoint.source
        weights, biases = (list(map(source, t)) for t in (described.weights, described.biases))
        columns = described.weights[0].shape[1]
        self._count((*described.weights, *described.biases))
        if not described.transposed:
            return self._reader.add_packed(weights, columns, biases)
        (weight,) = weights
        return self._reader.add_transposed(weight, columns, biases)

    def _count(self, tensors: Sequence[Tensor]) -> None:
        new = [tensor for tensor in tensors if tensor not in self._counted]
        self._stored_bytes.append(sum(map(self._checkpoint.stored_bytes, new)))
        self._counted.update(new)


def _choose_dtype(dtype: str, config: DecoderConfig, checkpoint: Checkpoint, packed: bool) -> str:
    computed = _PACKED_DTYPES if packed else tuple(_DTYPES)
    if dtype == "auto":
        stored = checkpoint.dtype if config.dtype is None else config.dtype
        return stored if stored in computed else "float32"
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(_DTYPES)}, got {dtype}")
    if dtype not in computed:
        raise ConfigError(
            f"dtype={dtype} isn't computed by the native ops for CPUs: use "
            f"{' or '.join(computed)}, or another backend",
            argument="dtype",
            value=dtype,
        )
    return dtype
