"""Weights of a GGUF model with the names and the meaning of Hugging Face's.

Converters change some tensors: queries and keys of Llama are in the order of another rotation, and
norms of Gemma have 1 added. This module undoes it. No torch here.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import WeightsError
from aioserve.models.architecture import Architecture, Heads, Mixer, Tensor
from aioserve.models.families.experts import MOST_EXPERTS
from aioserve.models.gguf.composed import composed, part_shapes
from aioserve.models.gguf.config import architecture_of
from aioserve.models.gguf.formats import FORMATS, GGUFFormat, decoded
from aioserve.models.gguf.names import checkpoint_name, expert_names, part_names
from aioserve.models.gguf.parts import open_parts
from aioserve.models.stored import (
    PLAIN,
    Format,
    IntegerForm,
    Plain,
    Rows,
    StoredLinear,
    StoredTensor,
    StoredWeights,
)
from aioserve.models.tensor_names import check_there, expected_tensors, some_names
from aioserve.models.weight_integers import WeightIntegers

__all__ = ["Blocks", "GGUFWeights", "norm_offset", "paired_heads", "paired_rows"]

_BY_NAME = {form.name: form for form in FORMATS.values()}
_READ_WITH_THE_CONFIG = re.compile(
    r"rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd\.weight"
)

_GATE = ".shared_expert_gate.weight"
"""Ending of the name of a tensor with one output, which files leave out of its shape."""


@dataclass(frozen=True, slots=True)
class Blocks(Format):
    """Rows of GGUF's blocks in the part "weight", uint8 [rows, bytes of a row]."""

    form: GGUFFormat
    paired_heads: int = 0
    """Number of heads whose rows are stored in pairs; 0: rows are in order.

    A pair has the two dimensions that rotate together side by side. Elsewhere, the second one is
    half a head behind the first."""
    less: float = 0.0
    """Number to subtract from floats."""

    @property
    def name(self) -> str:
        pairs = f", pairs of {self.paired_heads} heads" if self.paired_heads else ""
        return self.form.name + pairs + (f" - {self.less:g}" if self.less else "")

    @property
    def title(self) -> str:
        return PLAIN.get(self.form.name, self.form.name)

    def integers(self, stored: StoredLinear) -> IntegerForm | None:
        return _integer_form(self.form)

    def rows(self, stored: StoredLinear, first: int, end: int) -> Rows:
        weight = stored.parts["weight"]
        if self.paired_heads:
            places = paired_rows(first, end, weight.shape[0] // self.paired_heads)
            low = int(places.min())
            content = weight.read(low, int(places.max()) + 1)[places - low]
        else:
            content = weight.read(first, end)
        found = decoded(self.form, content)
        if self.less and not isinstance(found, WeightIntegers):
            found -= np.float32(self.less)
        return found


def paired_rows(first: int, end: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Places of rows `first` to `end` in a file that has the halves of heads in turn."""
    head, within = np.divmod(np.arange(first, end), head_dim)
    half, place = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * place + half


@functools.cache
def _integer_form(form: GGUFFormat) -> IntegerForm | None:
    found = decoded(form, np.zeros((1, form.bytes_per_block), np.uint8))
    if not isinstance(found, WeightIntegers):
        return None
    return IntegerForm(
        found.bits,
        found.group_size,
        found.minimums is not None,
        form.scales,
        table=found.table,
    )


class GGUFWeights(StoredWeights):
    """Weights of the model whose first file is `path`, open until `close`.

    Raises `WeightsError` naming file and tensor if one is missing, left over or of another shape
    than in `architecture`, and the errors of `GGUFFile`.
    """

    def __init__(self, path: Path, architecture: Architecture) -> None:
        self._path = path
        self._architecture = architecture
        self._stack = ExitStack()
        self._found: dict[str, StoredTensor] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        """Names of the two parts that replace a tensor, by the tensor's name."""
        try:
            files = open_parts(path, self._stack)
            self._family = architecture_of(files[0].metadata, str(path))
            left = [
                stored
                for file in files
                for stored in file.tensors.values()
                if not self._place(stored)
            ]
            self._check(left)
        except BaseException:
            self._stack.close()
            raise
        self.total_bytes: int = sum(stored.num_bytes for stored in self._found.values())
        formats = {stored.dtype for stored in self._found.values()}
        # Quantised models were bfloat16 before, so that float16 would not suit them.
        self.dtype: str = (
            "bfloat16"
            if formats - PLAIN.keys()
            else PLAIN[self._found[architecture.embedding.name].dtype]
        )

    def close(self) -> None:
        self._found.clear()
        self._parts.clear()
        self._stack.close()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.name in self._found or tensor.name in self._parts

    def __getitem__(self, tensor: Tensor) -> StoredLinear:
        if (names := self._parts.get(tensor.name)) is not None:
            first, second = (self._part(self._found[name]) for name in names)
            return composed(self._mixer, tensor, first, second)
        stored = self._found[tensor.name]
        paired = paired_heads(self._family, self._architecture.heads, tensor)
        less = norm_offset(self._architecture, tensor)
        if stored.dtype in PLAIN and not (paired or less or tensor.transposed):
            plain = Plain(PLAIN[stored.dtype])
            return StoredLinear(plain, {"weight": stored}, tensor.rows, tensor.columns)
        blocks = Blocks(_BY_NAME[stored.dtype], paired, less)
        return _described(stored, tensor.rows, tensor.columns, blocks)

    @property
    def _mixer(self) -> Mixer:
        return self._architecture.layers[0].mixer

    def _part(self, stored: StoredTensor) -> StoredLinear:
        """Describe a tensor that is a part of another one, as the file has it."""
        *rows, columns = (*stored.shape, 1) if len(stored.shape) == 1 else stored.shape
        return _described(stored, math.prod(rows), columns, Blocks(_BY_NAME[stored.dtype]))

    def _place(self, stored: StoredTensor) -> bool:
        """Add the tensors that `stored` holds. False if one has no name in the architecture."""
        if _READ_WITH_THE_CONFIG.fullmatch(stored.name):
            return True
        for name, one in self._named(stored):
            if name is None:
                return False
            if (other := self._found.get(name)) is not None:
                raise WeightsError(f"{stored.path}: {stored.name} is also in {other.path}")
            self._found[name] = one
        return True

    def _named(self, stored: StoredTensor) -> Iterator[tuple[str | None, StoredTensor]]:
        """Yield each tensor that `stored` holds, with its name in the architecture."""
        axes = 2 if stored.name.endswith(".bias") else 3
        experts = stored.shape[0] if len(stored.shape) == axes else 0
        names = None
        if 0 < experts <= MOST_EXPERTS:
            names = expert_names(self._family, stored.name, experts)
        if names is None:
            name = checkpoint_name(self._family, stored.name)
            if len(stored.shape) == 1 and name is not None and name.endswith(_GATE):
                stored = msgspec.structs.replace(stored, shape=(1, *stored.shape))
            yield name, stored
            return
        yield from zip(names, stored.along_first_axis(), strict=True)

    def _check(self, left: list[StoredTensor]) -> None:
        expected = expected_tensors(self._architecture)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in expected.items():
            parts = part_names(self._family, name)
            if parts and name not in self._found and all(part in self._found for part in parts):
                self._parts[name] = parts
                shapes |= zip(parts, part_shapes(self._mixer, tensor), strict=True)
            elif len(tensor.shape) == 1:
                shapes[name] = (tensor.rows,)
            else:
                shapes[name] = (tensor.rows, tensor.columns)
        check_there(self._path, self._architecture, {*self._found, *self._parts})
        for name, stored in self._found.items():
            if (shape := shapes.get(name)) is None:
                left.append(stored)
                continue
            if stored.shape != shape:
                raise WeightsError(
                    f"{stored.label} has shape {list(stored.shape)}, and its metadata ask for "
                    f"{list(shape)}"
                )
            if len(shape) == 1 and stored.dtype not in PLAIN:
                raise WeightsError(f"{stored.label} is a vector of {stored.dtype}, must be floats")
        if left:
            names = some_names(stored.name for stored in left)
            raise WeightsError(
                f"{self._path}: the architecture {self._family} has no place for {names}"
            )


def _described(stored: StoredTensor, rows: int, columns: int, blocks: Blocks) -> StoredLinear:
    """Describe a weight [rows, columns] that is stored as blocks."""
    shape = rows, blocks.form.bytes_per_row(columns)
    weight = msgspec.structs.replace(stored, dtype="U8", shape=shape)
    integers = _integer_form(blocks.form)
    size = 0 if integers is None else integers.group_size
    return StoredLinear(blocks, {"weight": weight}, rows, columns, size)


def norm_offset(architecture: Architecture, tensor: Tensor) -> float:
    """Number that files have added to a tensor: for norms, their `weight_offset`, otherwise 0."""
    is_norm = tensor.name.endswith("norm.weight")
    return architecture.final_norm.weight_offset if is_norm else 0.0


def paired_heads(family: str, heads: Heads, tensor: Tensor) -> int:
    """Number of heads whose rows a file of `family` has in pairs, as in `Blocks`; 0: none."""
    if family != "llama":
        return 0
    if ".q_proj." in tensor.name:
        return heads.query
    return heads.kv if ".k_proj." in tensor.name else 0
