"""Reads the weights of a model into packed weights or plain arrays, not yet tensors.

No torch here, so that weights are read while torch is imported. Natively they are packed as they
are read, panel by panel on all of the pool's threads; what isn't stored as plain floats is decoded
after that. `loader` makes a `Decoder` of the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from aioserve import _native
from aioserve.errors import ConfigError, ModelError, WeightsError
from aioserve.models import architecture
from aioserve.models.architecture import Tensor, tensors_of
from aioserve.models.computed import ComputedFormats
from aioserve.models.config import DecoderConfig
from aioserve.models.decoding import ARRAY_DTYPES, Array, Decoding
from aioserve.models.files import ModelFiles
from aioserve.models.quantization.while_loading import QuantizedWhileLoading
from aioserve.models.stored import Plain, StoredWeights, same_bits, source_of

__all__ = ["ReadWeights", "ReportBytes", "WeightReading"]

ReportBytes = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) as tensors are read, in ascending order."""

TWO_COPIES_BYTES = 64 << 20
"""An embedding that is the output layer too is kept once, packed, if it is larger than this. Rows
of packed weights are slower to read, which shows in small models."""


class ReadWeights:
    """The weights of one model in memory, each to be taken once.

    `dtype` is float32, bfloat16 or float16. Where `formats` are packed, a linear layer's weight and
    bias are one `_native.LinearKernel`; else they are arrays. bfloat16 arrays have dtype int16.
    """

    def __init__(
        self, config: DecoderConfig, dtype: str, formats: ComputedFormats, max_model_len: int
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.computed = formats
        self.max_model_len = max_model_len
        self.head: architecture.Linear = architecture.Linear((config.head,))
        """The output layer."""
        self.has_table: bool = True
        """Whether the embedding is there as an array: else its rows are those of the head."""
        self.linears: dict[architecture.Linear, _native.LinearKernel] = {}
        self.arrays: dict[Tensor, Array] = {}
        self.formats: dict[str, int] = {}
        """Bytes in memory of the weights of each format that the files have, or that they were
        rounded to."""


class WeightReading(AbstractContextManager["WeightReading"]):
    """Checks the model in `files`, and reads its weights when told to. A context manager, which
    keeps the files open.

    dtype: float32, bfloat16, float16 or "auto", which is the checkpoint's: of activations, and of
        the weights that are held as floats.
    formats: what the backend computes. The native one knows no float16: a float16 checkpoint
        becomes float32, which holds its values exactly.
    quantization: "int8" or "int4": how plain weights of linear layers are rounded while they are
        read; None: not at all.
    max_model_len: longest context in tokens to be served; None: all the model has.
    memory_bytes: what the weights may take at most; None: anything.

    Raises as `load_model` does.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        dtype: str = "auto",
        formats: ComputedFormats,
        quantization: str | None = None,
        max_model_len: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        config = files.config()
        limit = config.max_position_embeddings
        length = limit if max_model_len is None else max_model_len
        if not 1 <= length <= limit:
            raise ConfigError(f"max_model_len must be in [1, {limit}] for this model, got {length}")
        self._stored = files.weights(config)
        try:
            if quantization is not None:
                self._stored = QuantizedWhileLoading(self._stored, config, quantization)
            chosen = _choose_dtype(dtype, config, self._stored, formats)
            needed = self._least_bytes(config, chosen, formats)
            if memory_bytes is not None and needed > memory_bytes:
                raise ModelError(
                    f"{files.path}: the weights take {needed} bytes in {chosen}, and there are "
                    f"{memory_bytes} bytes of memory"
                )
        except BaseException:
            self._stored.close()
            raise
        self._weights = ReadWeights(config, chosen, formats, length)
        self._decoding = Decoding(chosen)
        self._decoded: list[tuple[Callable[[], None], int]] = []
        """What is decoded when the reader is done, and the stored bytes that it reads first."""
        self._reader = _native.WeightReader(chosen)
        self._stored_bytes: list[int] = []
        """Stored bytes of the tensors that each entry of the reader reads for the first time."""
        self._counted: set[Tensor] = set()

    def __exit__(self, *error: object) -> None:
        self._stored.close()

    def stop(self) -> None:
        """Let `read` end with WeightsError, soon, from any thread; before it begins as well."""
        self._reader.stop()
        self._decoding.stop()

    def read(self, progress: ReportBytes | None = None) -> ReadWeights:
        """All weights; once. `progress` is called in this thread."""
        packed = self._plan()
        # Between two tensors the reading needs no lock of the interpreter's, for which it would
        # wait long beside a thread that imports.
        thread = threading.Thread(target=self._reader.run, name="aioserve-weights")
        thread.start()
        try:
            self._follow(_Report(progress, self._stored.total_bytes))
        finally:
            self._reader.stop()
            thread.join()
        for described, number in packed.items():
            self._weights.linears[described] = self._reader.take(number)
        return self._weights

    def _follow(self, report: _Report) -> None:
        read, done = self._stored_bytes, 0
        decoded_bytes = sum(count for _, count in self._decoded)
        skipped_bytes = self._stored.total_bytes - sum(read) - decoded_bytes
        while done < len(read):
            try:
                done = self._reader.wait(done)
            except RuntimeError as error:
                raise WeightsError(str(error)) from error
            report(skipped_bytes + sum(read[:done]))
        done_bytes = skipped_bytes + sum(read)
        for decode, count in self._decoded:
            decode()
            done_bytes += count
            report(done_bytes)

    # -- what is read, in the order of the computation

    def _plan(self) -> dict[architecture.Linear, int]:
        config, weights = self._weights.config, self._weights
        if config.head not in self._stored or self._head_is_stored_twice():
            weights.head = architecture.Linear((config.embedding,))
            values = config.embedding.rows * config.embedding.columns
            size = values * ARRAY_DTYPES[weights.dtype].itemsize
            weights.has_table = size <= TWO_COPIES_BYTES
        linears = [weights.head, *config.linears]
        vectors = [config.embedding] if weights.has_table else []
        in_linears = {tensor for described in linears for tensor in tensors_of(described)}
        vectors += (tensor for tensor in config.required if tensor not in in_linears)
        self._count_formats(set(vectors), linears)
        packed: dict[architecture.Linear, int] = {}
        for tensor in vectors:
            self._add_array(tensor)
        for described in linears:
            if not weights.computed.packed:
                for tensor in tensors_of(described):
                    self._add_array(tensor)
            elif self._is_plain(tensors_of(described)):
                packed[described] = self._add_packed(described)
            else:
                self._decode_kernel(described)
        return packed

    def _count_formats(
        self, vectors: Iterable[Tensor], linears: Iterable[architecture.Linear]
    ) -> None:
        weights, counted = self._weights, self._weights.formats
        float_bytes = ARRAY_DTYPES[weights.dtype].itemsize

        def count(tensors: Iterable[Tensor], formats: ComputedFormats | None) -> None:
            for stored in map(self._stored.__getitem__, tensors):
                held = stored.held_bytes(float_bytes, formats)
                counted[stored.format.name] = counted.get(stored.format.name, 0) + held

        # What isn't packed is one array, whether it is looked up or multiplied with.
        multiplied = {tensor for described in linears for tensor in tensors_of(described)}
        count(multiplied, weights.computed)
        count((v for v in vectors if weights.computed.packed or v not in multiplied), None)

    def _is_plain(self, tensors: Iterable[Tensor]) -> bool:
        """Whether C++ reads them as they are."""
        return all(isinstance(self._stored[tensor].format, Plain) for tensor in tensors)

    def _head_is_stored_twice(self) -> bool:
        """Whether the tied head is stored once more. If it differs from the embedding, the file is
        right and config.json isn't; transformers decides alike."""
        config, stored = self._weights.config, self._stored
        return config.tie_word_embeddings and same_bits(
            stored[config.head], stored[config.embedding]
        )

    def _add_array(self, tensor: Tensor) -> None:
        arrays, stored = self._weights.arrays, self._stored[tensor]
        if tensor in arrays:
            return
        if not self._is_plain((tensor,)):
            self._decode_array(tensor)
            return
        array = np.empty(tensor.shape, ARRAY_DTYPES[self._weights.dtype])
        arrays[tensor] = array
        columns = math.prod(tensor.shape[1:])
        self._reader.add_plain([source_of(stored, tensor.shape[0])], columns, array.ctypes.data)
        self._stored_bytes.append(self._new_bytes((tensor,)))

    def _add_packed(self, described: architecture.Linear) -> int:
        weights, biases = (
            [source_of(self._stored[tensor], tensor.shape[0]) for tensor in tensors]
            for tensors in (described.weights, described.biases)
        )
        columns = described.weights[0].shape[1]
        self._stored_bytes.append(self._new_bytes(tuple(tensors_of(described))))
        if not described.transposed:
            return self._reader.add_packed(weights, columns, biases)
        (weight,) = weights
        return self._reader.add_transposed(weight, columns, biases)

    def _decode_array(self, tensor: Tensor) -> None:
        def decode() -> None:
            array = self._decoding.array([self._stored[tensor]])
            self._weights.arrays[tensor] = (
                array.T if tensor.transposed else array.reshape(tensor.shape)
            )

        self._decoded.append((decode, self._new_bytes((tensor,))))

    def _decode_kernel(self, described: architecture.Linear) -> None:
        def decode() -> None:
            weights, biases = (
                [self._stored[tensor] for tensor in tensors]
                for tensors in (described.weights, described.biases)
            )
            self._weights.linears[described] = self._decoding.kernel(weights, biases)

        self._decoded.append((decode, self._new_bytes(tuple(tensors_of(described)))))

    def _new_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Stored bytes of those that weren't asked for before."""
        new = [tensor for tensor in tensors if tensor not in self._counted]
        self._counted.update(new)
        return sum(self._stored[tensor].num_bytes for tensor in new)

    def _least_bytes(self, config: DecoderConfig, dtype: str, formats: ComputedFormats) -> int:
        """Bytes of the weights, each held once."""
        multiplied = {weight for described in config.linears for weight in described.weights}
        multiplied.add(config.embedding if config.head not in self._stored else config.head)
        return sum(
            self._stored[tensor].held_bytes(
                ARRAY_DTYPES[dtype].itemsize, formats if tensor in multiplied else None
            )
            for tensor in (*config.required, config.head)
            if tensor in self._stored
        )


class _Report:
    """Passes counts on that are larger than all before."""

    def __init__(self, progress: ReportBytes | None, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._reported = 0

    def __call__(self, done_bytes: int) -> None:
        if self._progress is not None and done_bytes > self._reported:
            self._progress(done_bytes, self._total_bytes)
            self._reported = done_bytes


def _choose_dtype(
    dtype: str, config: DecoderConfig, stored: StoredWeights, formats: ComputedFormats
) -> str:
    computed = formats.dtypes
    if dtype == "auto":
        said = stored.dtype if config.dtype is None else config.dtype
        return said if said in computed else "float32"
    if dtype not in ARRAY_DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(ARRAY_DTYPES)}, got {dtype}")
    if dtype not in computed:
        raise ConfigError(
            f"dtype={dtype} isn't computed by the native ops for CPUs: use "
            f"{' or '.join(computed)}, or another backend",
            argument="dtype",
            value=dtype,
        )
    return dtype
