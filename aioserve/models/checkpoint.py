"""The weights of a model directory: finds the safetensors files, checks them, reads tensors.

Files are memory-mapped, and a tensor is read when it is asked for. Everything that can be checked
from the headers (missing shards and tensors, shapes, dtypes, leftovers) is checked on opening,
before anything is read. Errors are `WeightsError` naming file and tensor.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from aioserve.errors import WeightsError
from aioserve.models.architecture import Architecture, Tensor
from aioserve.models.fields import read_json

__all__ = ["Checkpoint"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_NAMED = 4  # tensors that a message spells out


class Checkpoint:
    """The weight files of one directory, open until `close` (or the end of `with`).

    `total_bytes` is the stored size of the tensors that the model uses.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self._directory = directory
        self._architecture = architecture
        self._stack = ExitStack()
        self._found: dict[str, _Stored] = {}
        try:
            for path, names in _weight_files(directory).items():
                self._open(path, names)
            self._check()
        except BaseException:
            self._stack.close()
            raise
        self.total_bytes: int = sum(stored.num_bytes for stored in self._found.values())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._found.clear()
        self._stack.close()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.name in self._found

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding as stored."""
        return _DTYPES[self._found[self._architecture.embedding.name].dtype]

    def stored_bytes(self, tensor: Tensor) -> int:
        return self._found[tensor.name].num_bytes

    def read(self, tensor: Tensor) -> torch.Tensor:
        """The tensor in its stored dtype, a view of the mapped file: copy it to keep it."""
        stored = self._found[tensor.name]
        try:
            return stored.file.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{stored.path}: {stored.name} can't be read: {error}") from error

    def _open(self, path: Path, expected: set[str] | None) -> None:
        if not path.is_file():
            raise WeightsError(
                f"{path}: no such file, but {INDEX_FILE} places {len(expected or ())} tensors "
                f"in it, such as {min(expected or {'none'})}"
            )
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            names = set(file.keys())
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: {_why_unreadable(path, error)}") from error
        if expected is not None and (absent := expected - names):
            raise WeightsError(
                f"{path}: lacks {_some(absent)}, which {INDEX_FILE} places in this file"
            )
        for name in names if expected is None else expected:
            if self._architecture.ignored.search(name):
                continue
            view = file.get_slice(name)
            stored = _Stored(file, path, name, tuple(view.get_shape()), view.get_dtype())
            if (
                other := self._found.get(canonical := self._architecture.canonical(name))
            ) is not None:
                raise WeightsError(f"{path}: {name} is also in {other.path} as {other.name}")
            self._found[canonical] = stored

    def _check(self) -> None:
        head = self._architecture.head
        expected = {tensor.name: tensor for tensor in (*self._architecture.required, head)}
        absent = expected.keys() - self._found.keys()
        if absent := absent - {head.name} if self._architecture.tie_word_embeddings else absent:
            raise WeightsError(f"{self._directory}: the weights lack {_some(absent)}")
        for name, stored in self._found.items():
            if (tensor := expected.get(name)) is None:
                continue
            if stored.shape != tensor.shape:
                raise WeightsError(
                    f"{stored.path}: {stored.name} has shape {list(stored.shape)}, "
                    f"config.json asks for {list(tensor.shape)}"
                )
            if stored.dtype not in _DTYPES:
                raise WeightsError(
                    f"{stored.path}: {stored.name} has dtype {stored.dtype}, only "
                    f"{', '.join(_DTYPES)} can be loaded"
                )
        # A tensor that nothing reads means that config.json and weights disagree, for instance on
        # biases: the answers would be wrong without any other sign.
        if leftover := self._found.keys() - expected.keys():
            stored_names = {self._found[name].name for name in leftover}
            files = {self._found[name].path.name for name in leftover}
            raise WeightsError(
                f"{self._directory}: the architecture of config.json has no place for "
                f"{_some(stored_names)} in {', '.join(sorted(files)[:_NAMED])}"
            )


class _Stored:
    """Where one tensor lies."""

    __slots__ = ("dtype", "file", "name", "path", "shape")

    def __init__(
        self, file: Any, path: Path, name: str, shape: tuple[int, ...], dtype: str
    ) -> None:
        self.file = file
        self.path = path
        self.name = name
        self.shape = shape
        self.dtype = dtype

    @property
    def num_bytes(self) -> int:
        count = _ITEM_BYTES.get(self.dtype, 1)
        for size in self.shape:
            count *= size
        return count


def _weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """File -> the tensors to take from it; None: all."""
    if (single := directory / SINGLE_FILE).is_file():
        return {single: None}
    if (index := directory / INDEX_FILE).is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index}: weight_map must be an object that maps tensors to files")
        files: dict[Path, set[str] | None] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise WeightsError(
                    f"{index}: weight_map.{name} must be a file name in the same directory, "
                    f"got {file_name!r}"
                )
            names = files.setdefault(directory / file_name, set())
            if names is not None:
                names.add(name)
        return files
    raise WeightsError(_no_weights(directory))


def _no_weights(directory: Path) -> str:
    wanted = f"expected {SINGLE_FILE} or {INDEX_FILE}"
    if others := sorted(path.name for path in directory.glob("*.safetensors")):
        return f"{directory}: {wanted}, found only {', '.join(others[:_NAMED])}"
    message = f"no .safetensors in {directory}: {wanted}"
    pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth") for p in directory.glob(kind))
    if pickles:
        message += (
            f"; {pickles[0]} is a pickle and isn't loaded: convert it with transformers' "
            f"save_pretrained"
        )
    return message


def _why_unreadable(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(20).startswith(b"version https://git"):
            return "is a Git LFS pointer, not weights: run `git lfs pull`"
    return f"not a complete safetensors file: {error}"


def _some(names: set[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {more} more tensors" if more > 0 else "")
