"""Formats of weights that plugins declare: their code decodes rows to floats.

No kernel knows such a format. Weights become floats of the model's dtype while they are read, on
every backend.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import ModelError, PluginError, WeightsError
from aioserve.isolation import blamed, shown
from aioserve.models.architecture import Tensor
from aioserve.models.fields import Fields
from aioserve.models.quantization.scheme import Parts, Scheme
from aioserve.models.stored import Floats, Format, StoredLinear

__all__ = [
    "WeightFormat",
    "WeightPart",
    "WeightReader",
    "check_weight_format_value",
    "scheme_of",
]

Array = npt.NDArray[Any]


class WeightPart(msgspec.Struct, frozen=True):
    """One of the tensors that hold a weight."""

    dtypes: tuple[str, ...]
    """Dtypes that it may have, as safetensors files spell them: "I8", "F16", "BF16"."""
    shape: tuple[int, ...]
    by_rows: bool = True
    """True if its first axis are the rows of the weight: then rows alone are read. False: it is
    read whole each time."""


class WeightReader(ABC):
    """Reads the weights of one checkpoint, as its `quantization_config` says. Called on any thread,
    on several at once."""

    unread: tuple[str, ...] = ()
    """Names of parts that may be there, and that no number of a weight depends on."""

    @abstractmethod
    def parts(self, rows: int, columns: int) -> Mapping[str, WeightPart]:
        """The tensors that hold a weight [rows, columns], by the last part of their names:
        "weight" for "model.layers.0.mlp.down_proj.weight"."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Array], first: int, end: int, columns: int) -> Floats:
        """Rows `first` to `end` of a weight: float32 [end - first, columns]. Arrays of parts have
        these rows, or are whole where `by_rows` is False. BF16 is uint16 and floats of 8 bits are
        uint8: the bits."""


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A format in which checkpoints store quantized weights. Its rows are decoded to floats."""

    read: Callable[[Fields], WeightReader]
    """Makes the reader of a checkpoint, given its `quantization_config`. It refuses a setting that
    it doesn't know: `Fields.unsupported` raises that."""
    example: Mapping[str, Any] = {}
    """A `quantization_config` of the format, for checks."""
    encode: Callable[[Floats], Mapping[str, Array]] | None = None
    """Encodes a weight, float32 [rows, columns], by the example, for checks: arrays of its parts
    by name."""


def check_weight_format_value(written: object) -> None:
    """Raise `ValueError`, in words, for what is no format of weights."""
    if not isinstance(written, WeightFormat):
        raise ValueError(f"must be a WeightFormat, got {shown(written)}")
    if not callable(written.read):
        raise ValueError(f"read must be callable, got {shown(written.read)}")
    if not isinstance(written.example, Mapping):
        raise ValueError(f"example must be a mapping, got {shown(written.example)}")
    if written.encode is not None and not callable(written.encode):
        raise ValueError(f"encode must be callable or None, got {shown(written.encode)}")


def scheme_of(method: str, written: WeightFormat, label: str) -> Callable[[Fields], DeclaredScheme]:
    """The reader of the `quantization_config` of a declared method. `label` names its plugin."""
    what = f"weight format {label}"

    def read(config: Fields) -> DeclaredScheme:
        with blamed(f"{what} can't read {config.source}", ModelError, PluginError):
            reader: object = written.read(config)
            if not isinstance(reader, WeightReader):
                raise PluginError(f"{what} gave {shown(reader)}, which is no WeightReader")
            unread = reader.unread
            if not isinstance(unread, tuple) or not all(isinstance(one, str) for one in unread):
                raise PluginError(f"{what}: unread must be a tuple of str, got {shown(unread)}")
        said = json.dumps(config.values, sort_keys=True, default=repr)
        digest = hashlib.sha256(said.encode()).hexdigest()[:16]
        return DeclaredScheme(method, what, digest, reader)

    return read


class DeclaredScheme(Scheme):
    """The scheme of one checkpoint, whose mistakes name its plugin."""

    precision = ""
    unread: re.Pattern[str]

    def __init__(self, method: str, what: str, digest: str, reader: WeightReader) -> None:
        self._method = method
        self._what = what
        self._format = DeclaredFormat(method, what, digest, reader)
        self.unread = re.compile("|".join(map(re.escape, reader.unread)) or r"(?!)")

    @property
    def name(self) -> str:
        return self._method

    def linear(self, tensor: Tensor, parts: Parts) -> StoredLinear:
        rows, columns = tensor.rows, tensor.columns
        asked = self._format.parts(rows, columns)
        found = {name: parts.take(name, one.dtypes, one.shape) for name, one in asked.items()}
        whole = frozenset(name for name, one in asked.items() if not one.by_rows)
        return StoredLinear(replace(self._format, whole=whole), found, rows, columns)


@dataclass(frozen=True, slots=True)
class DeclaredFormat(Format):
    """The format of its weights. `digest` tells what `quantization_config` says."""

    method: str
    what: str
    digest: str
    reader: WeightReader
    whole: frozenset[str] = frozenset()
    """Names of the parts that are read whole."""

    @property
    def name(self) -> str:
        return f"{self.method}-{self.digest}"

    @property
    def title(self) -> str:
        return self.method

    def integers(self, stored: StoredLinear) -> None:
        return None

    def parts(self, rows: int, columns: int) -> Mapping[str, WeightPart]:
        """The parts of a weight, checked."""
        with blamed(f"{self.what} can't say the parts of a weight", PluginError):
            asked = dict(self.reader.parts(rows, columns))
            for name, one in asked.items():
                whole = isinstance(name, str) and isinstance(one, WeightPart)
                if whole and not (_is_tuple_of(one.dtypes, str) and _is_tuple_of(one.shape, int)):
                    raise PluginError(
                        f"{self.what}: dtypes of a part must be a tuple of str and shape one of "
                        f"int, got {shown(one.dtypes)} and {shown(one.shape)} for {shown(name)}"
                    )
                if not whole or (one.by_rows and one.shape[:1] != (rows,)):
                    raise PluginError(
                        f"{self.what}: each part must be a WeightPart, with {rows} rows where "
                        f"by_rows is True, got {shown(name)}: {shown(one)}"
                    )
            if not asked:
                raise PluginError(f"{self.what}: a weight must have parts")
            return asked

    def rows(self, stored: StoredLinear, first: int, end: int) -> Floats:
        columns = stored.in_features
        arrays = {
            name: part.read() if name in self.whole else part.read(first, end)
            for name, part in stored.parts.items()
        }
        with blamed(f"{self.what} can't decode {stored.name}", WeightsError, PluginError):
            found: object = self.reader.decode(arrays, first, end, columns)
            shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
            is_array = isinstance(found, np.ndarray)
            if not is_array or dtype != np.float32 or shape != (end - first, columns):
                raise PluginError(
                    f"{self.what}: decode must give float32 {[end - first, columns]}, got "
                    f"{dtype} {list(shape or ())} for {stored.name}"
                )
            return np.ascontiguousarray(found)


def _is_tuple_of(values: object, kind: type) -> bool:
    return isinstance(values, tuple) and all(type(value) is kind for value in values)
