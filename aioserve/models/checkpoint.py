"""Weights of a model directory: finds the safetensors files, checks them, places tensors.

Opening checks everything that the headers show: missing shards and tensors, shapes, dtypes,
leftovers. No tensor is read for that. Errors are `WeightsError` naming file and tensor. No torch
here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from aioserve.errors import WeightsError
from aioserve.isolation import shown
from aioserve.json_file import read_json_object
from aioserve.models.architecture import Architecture, Tensor
from aioserve.models.families.experts import MOST_EXPERTS
from aioserve.models.quantization.scheme import KV_SCALES, Parts, Scheme
from aioserve.models.reordered import InTurns
from aioserve.models.safetensors_file import SafetensorsFile
from aioserve.models.stored import PLAIN, Floats, Plain, StoredLinear, StoredTensor, StoredWeights
from aioserve.models.tensor_names import check_there, expected_tensors, short_name, some_names

__all__ = ["INDEX_FILE", "SINGLE_FILE", "Checkpoint", "read_rows", "tensor_names", "weight_files"]

SINGLE_FILE: str = "model.safetensors"
INDEX_FILE: str = "model.safetensors.index.json"
_WEIGHT = ".weight"

_NAMED = 4  # tensors that a message spells out
_MOST_NAME_CHARS = 200
_FILE_NAME = re.compile(rf"[^/\\\0\ud800-\udfff]{{1,{_MOST_NAME_CHARS}}}\.safetensors")

MAX_INDEX_BYTES = 16 << 20
"""Most bytes of an index. The largest in use have 9 MB."""


class Checkpoint(StoredWeights):
    """Weight files of one directory, open until `close`.

    `scheme` describes the storage of quantised weights; None: all are plain."""

    def __init__(
        self, directory: Path, architecture: Architecture, scheme: Scheme | None = None
    ) -> None:
        self._directory = directory
        self._architecture = architecture
        self._scheme = scheme
        self._stack = ExitStack()
        self._found: dict[str, StoredTensor] = {}
        self._weights: dict[str, StoredLinear] = {}
        try:
            for path, names in weight_files(directory).items():
                self._open(path, names)
            self._describe()
        except BaseException:
            self._stack.close()
            raise
        self.total_bytes: int = sum(stored.num_bytes for stored in self._weights.values())
        embedding = self._weights[architecture.embedding.name].format
        self.dtype: str = embedding.name if isinstance(embedding, Plain) else "bfloat16"

    def close(self) -> None:
        self._weights.clear()
        self._stack.close()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.name in self._weights

    def __getitem__(self, tensor: Tensor) -> StoredLinear:
        stored = self._weights[tensor.name]
        if tensor.turns is None:
            return stored
        return replace(stored, format=InTurns(stored.format, *tensor.turns, tensor.rows))

    def _open(self, path: Path, expected: set[str] | None) -> None:
        tensors = open_tensors(path, expected, self._stack)
        for name in tensors:
            if self._architecture.ignored.search(name) or (
                self._scheme is not None and KV_SCALES.search(name)
            ):
                continue
            for canonical, stored in self._named(tensors[name]):
                if (other := self._found.get(canonical)) is not None:
                    raise WeightsError(
                        f"{path}: {short_name(name)} is also in {other.path} as "
                        f"{short_name(other.name)}"
                    )
                self._found[canonical] = stored

    def _named(self, stored: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
        """Yield each tensor that `stored` holds, with its name here: several if it is stacked."""
        name = self._architecture.canonical(stored.name)
        each = self._architecture.name_of_each(name)
        if each is None or not stored.shape or not 1 <= stored.shape[0] <= MOST_EXPERTS:
            yield name, stored
            return
        for i, part in enumerate(stored.along_first_axis()):
            yield each.format(i), part

    def _describe(self) -> None:
        expected, found = expected_tensors(self._architecture), self._found
        parts = {} if self._scheme is None else _parts_of_modules(expected, found)
        taken: set[str] = set()
        for name, tensor in expected.items():
            if (own := parts.get(name)) is not None and self._scheme is not None:
                self._weights[name] = linear = self._scheme.linear(tensor, own)
                taken |= _taken(name, own, linear, self._scheme)
            elif (stored := found.get(name)) is not None:
                self._weights[name] = self._plain(tensor, stored)
                taken.add(name)
        check_there(self._directory, self._architecture, self._weights)
        # An unused tensor means that config.json and weights disagree, for instance on biases.
        # Completions would be wrong without any other sign.
        if leftover := found.keys() - taken:
            stored_names = {found[name].name for name in leftover}
            files = {found[name].path.name for name in leftover}
            raise WeightsError(
                f"{self._directory}: the architecture of config.json has no place for "
                f"{some_names(stored_names)} in {', '.join(sorted(files)[:_NAMED])}"
            )

    def _plain(self, tensor: Tensor, stored: StoredTensor) -> StoredLinear:
        if stored.shape != tensor.shape:
            raise WeightsError(
                f"{stored.path}: {stored.name} has shape {shown(list(stored.shape))}, "
                f"config.json asks for {list(tensor.shape)}"
            )
        if stored.dtype not in PLAIN:
            raise WeightsError(
                f"{stored.path}: {stored.name} has dtype {stored.dtype}, only "
                f"{', '.join(PLAIN)} can be loaded"
            )
        plain = Plain(PLAIN[stored.dtype], tensor.transposed)
        return StoredLinear(plain, {"weight": stored}, tensor.rows, tensor.columns)


def _parts_of_modules(
    expected: Mapping[str, Tensor], found: Mapping[str, StoredTensor]
) -> dict[str, Parts]:
    """Collect the parts of the weights that aren't stored as plain floats, by weight name."""
    modules = {
        name.removesuffix(_WEIGHT): name
        for name, tensor in expected.items()
        if name.endswith(_WEIGHT) and len(tensor.shape) > 1
    }
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in found.items():
        module = name
        # Other tensors of a layer, for example a router's correction, are no parts of its weight.
        if name in expected and name.rpartition(".")[2] not in ("weight", "bias"):
            continue
        while module := module.rpartition(".")[0]:
            if module in modules:
                parts.setdefault(module, {})[name.removeprefix(module + ".")] = stored
                break
    return {
        modules[module]: Parts(_stored_name(module, own), own)
        for module, own in parts.items()
        if own.keys() - {"weight", "bias"} or own["weight"].dtype not in PLAIN
    }


def _stored_name(module: str, parts: Mapping[str, StoredTensor]) -> str:
    """Name of the module in the file, which quantization_config uses too."""
    names = ((stored.name, "." + rest) for rest, stored in parts.items())
    return next((name.removesuffix(rest) for name, rest in names if name.endswith(rest)), module)


def _taken(name: str, parts: Parts, linear: StoredLinear, scheme: Scheme) -> set[str]:
    """Names of a module's tensors that are accounted for: used by its weight, or not needed."""
    module = name.removesuffix(_WEIGHT)
    read = {stored.name for stored in linear.parts.values()}
    return {
        f"{module}.{rest}"
        for rest, stored in parts.found.items()
        if stored.name in read
        or scheme.unread.fullmatch(rest)
        or (rest == "bias" and not stored.read().any())  # some programs write zeros everywhere
    }


def weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Return the files with weights, each with the tensors to take from it; None: all."""
    if os.path.isfile(single := directory / SINGLE_FILE):
        return {single: None}
    if os.path.lexists(index := directory / INDEX_FILE):
        weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index}: weight_map must be an object that maps tensors to files")
        files: dict[Path, set[str] | None] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
                raise WeightsError(
                    f"{index}: weight_map.{short_name(name)} must be a .safetensors file name in "
                    f"the same directory, of at most {_MOST_NAME_CHARS} characters before the "
                    f"dot, got {shown(file_name)}"
                )
            names = files.setdefault(directory / file_name, set())
            if names is not None:
                names.add(name)
        return files
    raise WeightsError(_no_weights(directory))


def open_tensors(
    path: Path, expected: set[str] | None, stack: ExitStack
) -> dict[str, StoredTensor]:
    """Open a file until `stack` closes it, and return its `expected` tensors by name; None: all.

    Raises `WeightsError` if the file or an expected tensor is missing."""
    if not os.path.isfile(path):
        raise WeightsError(
            f"{path}: no such file, but {INDEX_FILE} places {len(expected or ())} tensors in it, "
            f"such as {short_name(min(expected or {'none'}))}"
        )
    file = SafetensorsFile(path)
    stack.callback(file.close)
    if expected is None:
        return dict(file.tensors)
    if absent := expected - file.tensors.keys():
        raise WeightsError(
            f"{path}: lacks {some_names(absent)}, which {INDEX_FILE} places in this file"
        )
    return {name: file.tensors[name] for name in expected}


def tensor_names(directory: Path) -> set[str]:
    """Names of all tensors in the weight files. Raises `WeightsError`."""
    names: set[str] = set()
    for path, own in weight_files(directory).items():
        if own is None:
            file = SafetensorsFile(path)
            own = set(file.tensors)
            file.close()
        names |= own
    return names


def read_rows(
    directory: Path,
    architecture: Architecture,
    name: str,
    rows: Sequence[int],
    shape: tuple[int, ...],
) -> list[Floats]:
    """Read rows of a tensor of plain floats, each float32 [columns].

    Raises `WeightsError` if it is missing, isn't plain or has another shape."""
    for path in weight_files(directory):
        file = SafetensorsFile(path)
        try:
            for stored_name, stored in file.tensors.items():
                if architecture.canonical(stored_name) != name:
                    continue
                if stored.shape != shape:
                    raise WeightsError(
                        f"{stored.label} has shape {shown(list(stored.shape))}, config.json asks "
                        f"for {list(shape)}"
                    )
                return [stored.read_floats(row, row + 1)[0] for row in rows]
        finally:
            file.close()
    raise WeightsError(f"{directory}: the weights lack {name} in plain floats")


def _no_weights(directory: Path) -> str:
    if os.path.lexists(single := directory / SINGLE_FILE):
        return f"{single}: not a file that can be read, or a link to none"
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
