"""Reading of a model's weights into packed kernels or numpy arrays.

No torch here, so that weights are read while torch is imported. The native reader packs weights as
it reads them, panel by panel on all threads of the pool. Weights in other formats than plain floats
are decoded after that. `loader` makes a `Decoder` of the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from aioserve import _native
from aioserve.errors import ConfigError, ModelError, UnsupportedModelError, WeightsError
from aioserve.formats.weights import ComputedFormats, PackedLinear
from aioserve.models import architecture
from aioserve.models.architecture import Tensor, parts_of
from aioserve.models.config import DecoderConfig
from aioserve.models.decoding import ARRAY_DTYPES, Array, Decoding
from aioserve.models.files import ModelFiles
from aioserve.models.limits import too_large
from aioserve.models.packed_decoding import PackedDecoding
from aioserve.models.quantization.while_loading import QuantizedWhileLoading
from aioserve.models.stored import Plain, StoredLinear, StoredWeights, source_of
from aioserve.models.weight_memory import (
    ExpectedKernels,
    KernelBytes,
    WeightLayout,
    WeightMemory,
    bytes_of_kernel,
    weight_memory,
)

__all__ = ["ReadWeights", "ReportBytes", "TakenWeights", "WeightReading"]

ReportBytes = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) as tensors are read, in ascending order."""


class TakenWeights:
    """Weights in memory, each to be taken once.

    `dtype` is float32, bfloat16 or float16; arrays of bfloat16 have dtype int16. The weights and
    biases of a linear layer that isn't in `linears` are in `arrays`.
    """

    def __init__(self, dtype: str, max_model_len: int) -> None:
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.linears: dict[architecture.Linear, _native.LinearKernel | PackedLinear] = {}
        self.arrays: dict[Tensor, Array] = {}


class ReadWeights(TakenWeights):
    """Weights of one model in memory.

    If `formats` are packed, each linear layer is one `_native.LinearKernel`. Otherwise its weights
    are arrays, or one `PackedLinear` if the backend multiplies some of its rows as quantised.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: str,
        formats: ComputedFormats,
        layout: WeightLayout,
        max_model_len: int,
    ) -> None:
        super().__init__(dtype, max_model_len)
        self.config = config
        self.computed = formats
        self.layout = layout
        self.memory: WeightMemory = WeightMemory(formats=(), step_bytes=0)
        """Memory of the weights; empty until they are read."""


class WeightReading(AbstractContextManager["WeightReading"]):
    """Check of the model in `files`, then `read` of its weights. A context manager.

    It keeps the files open until it exits.

    - dtype: dtype of activations, and of weights that are held as floats: float32, bfloat16,
      float16, or "auto" for the checkpoint's.
    - formats: formats that the backend computes. The native one has no float16: a float16
      checkpoint becomes float32, which is exact.
    - quantization: format to which plain weights of linear layers are rounded while they are read:
      "int8", "int4" or "fp8"; None: they are not rounded.
    - max_model_len: longest context served, in tokens; None: the model's limit.
    - memory_bytes: most bytes that the weights may take; None: no limit.

    Raises the errors of `load_model`.
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
        if (why := too_large(config, formats.attention)) is not None:
            raise UnsupportedModelError(f"{files.config_values()[1]}: {why}")
        self._stored = files.weights(config)
        try:
            if quantization is not None:
                self._stored = QuantizedWhileLoading(self._stored, config, quantization)
            chosen = _choose_dtype(dtype, config, self._stored, formats)
            layout = WeightLayout.of(config, self._stored, chosen)
            self._weights = ReadWeights(config, chosen, formats, layout, length)
            self._decoding = PackedDecoding(chosen, formats)
            self._wide = Decoding("float32")
            self.expected_memory: WeightMemory = self._expected_memory()
            """Memory that the weights will take."""
            needed = self.expected_memory.held_bytes
            if memory_bytes is not None and needed > memory_bytes:
                fits = "" if quantization is not None else self._what_fits(memory_bytes)
                raise ModelError(
                    f"{files.path}: the weights take {needed} bytes in {chosen}, and there are "
                    f"{memory_bytes} bytes of memory{fits}"
                )
        except BaseException:
            self._stored.close()
            raise
        self._decoded: list[tuple[Callable[[], None], int]] = []
        """Decoding to do after the reader, each with the stored bytes that it is first to read."""
        self._reader = _native.WeightReader(chosen)
        self._stored_bytes: list[int] = []
        """Stored bytes that each entry of the reader is first to read."""
        self._counted: set[Tensor] = set()

    def __exit__(self, *error: object) -> None:
        self._stored.close()

    def stop(self) -> None:
        """Make `read` raise WeightsError soon, also if it has not begun. Callable in any thread."""
        self._reader.stop()
        self._decoding.stop()
        self._wide.stop()

    def read(self, progress: ReportBytes | None = None) -> ReadWeights:
        """Read all weights. May be called once. `progress` is called in this thread."""
        packed = self._plan()
        # The reader's thread does not take the GIL between tensors, for which it would wait long
        # while another thread imports modules.
        thread = threading.Thread(target=self._reader.run, name="aioserve-weights")
        thread.start()
        try:
            self._follow(_Report(progress, self._stored.total_bytes))
        finally:
            self._reader.stop()
            thread.join()
        for described, number in packed.items():
            self._weights.linears[described] = self._reader.take(number)
        self._weights.memory = self._memory(self._sizes)
        return self._weights

    def _expected_memory(self) -> WeightMemory:
        if self._weights.computed.packed:
            return self._memory(ExpectedKernels(self._stored, self._decoding))
        return self._memory(self._expected_sizes)

    def _what_fits(self, memory_bytes: int) -> str:
        """Suggest a quantization by which the weights would fit, for the message of an error.

        It replaces `_stored`, so that nothing can be read afterwards."""
        plain, needed = self._stored, 0
        for method in ("int8", "int4"):
            try:
                self._stored = QuantizedWhileLoading(plain, self._weights.config, method)
            except ConfigError:  # they are quantised already
                return ""
            needed = self._expected_memory().held_bytes
            if needed <= memory_bytes:
                return f": with quantization={method!r} they take {needed}, which fits"
        return f": with quantization='int4' they take {needed}, which doesn't fit either"

    def _memory(self, kernels: KernelBytes) -> WeightMemory:
        weights = self._weights
        all_arrays = not weights.computed.packed and not any(
            map(self._is_held, weights.layout.linears)
        )
        return weight_memory(
            weights.layout, self._stored, weights.dtype, None if all_arrays else kernels
        )

    def _is_held(self, described: architecture.Linear) -> bool:
        """True if a layer becomes a `PackedLinear`."""
        return self._decoding.is_held([self._stored[weight] for weight in described.weights])

    def _expected_sizes(self, described: architecture.Linear) -> Sequence[tuple[int, int]]:
        weights, biases = self._parts(described)
        if self._decoding.is_held(weights):
            return self._decoding.expected_sizes(weights, biases)
        return self._array_sizes(described)

    def _sizes(self, described: architecture.Linear) -> Sequence[tuple[int, int]]:
        held = self._weights.linears.get(described)
        if held is None:
            return self._array_sizes(described)
        return held.sizes if isinstance(held, PackedLinear) else bytes_of_kernel(held)

    def _array_sizes(self, described: architecture.Linear) -> Sequence[tuple[int, int]]:
        values = sum(tensor.rows * tensor.columns for tensor in parts_of(described, Tensor))
        outputs = sum(weight.rows for weight in described.weights)
        return ((outputs, values * ARRAY_DTYPES[self._weights.dtype].itemsize),)

    def _parts(
        self, described: architecture.Linear
    ) -> tuple[list[StoredLinear], list[StoredLinear]]:
        """Stored weights and biases of a layer."""
        weights = [self._stored[tensor] for tensor in described.weights]
        return weights, [self._stored[tensor] for tensor in described.biases]

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

    # -- plan of the reading, in the order of the computation

    def _plan(self) -> dict[architecture.Linear, int]:
        layout = self._weights.layout
        packed: dict[architecture.Linear, int] = {}
        for tensor in layout.arrays:
            self._add_array(tensor)
        for described in layout.linears:
            if not self._weights.computed.packed and not self._is_held(described):
                for tensor in parts_of(described, Tensor):
                    self._add_array(tensor)
            elif self._is_plain(parts_of(described, Tensor)):
                packed[described] = self._add_packed(described)
            else:
                self._decode_linear(described)
        return packed

    def _is_plain(self, tensors: Iterable[Tensor]) -> bool:
        """True if the C++ reader can read all of `tensors`: they are stored as plain floats."""
        return all(isinstance(self._stored[tensor].format, Plain) for tensor in tensors)

    def _add_array(self, tensor: Tensor) -> None:
        arrays, stored = self._weights.arrays, self._stored[tensor]
        if tensor in arrays:
            return
        if tensor.is_wide or not self._is_plain((tensor,)):
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
        self._stored_bytes.append(self._new_bytes(tuple(parts_of(described, Tensor))))
        if not described.transposed:
            return self._reader.add_packed(weights, columns, biases)
        (weight,) = weights
        return self._reader.add_transposed(weight, columns, biases)

    def _decode_array(self, tensor: Tensor) -> None:
        def decode() -> None:
            decoding = self._wide if tensor.is_wide else self._decoding
            array = decoding.array([self._stored[tensor]])
            self._weights.arrays[tensor] = (
                array.T if tensor.transposed else array.reshape(tensor.shape)
            )

        self._decoded.append((decode, self._new_bytes((tensor,))))

    def _decode_linear(self, described: architecture.Linear) -> None:
        decoding, packed = self._decoding, self._weights.computed.packed
        decoded = decoding.kernel if packed else decoding.held

        def decode() -> None:
            self._weights.linears[described] = decoded(*self._parts(described))

        self._decoded.append((decode, self._new_bytes(tuple(parts_of(described, Tensor)))))

    def _new_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Stored bytes of the tensors that have not been counted before."""
        new = [tensor for tensor in tensors if tensor not in self._counted]
        self._counted.update(new)
        return sum(self._stored[tensor].num_bytes for tensor in new)


class _Report:
    """Reports only counts above all earlier ones."""

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
