"""Tensors of directories that GGUF files split in two. No torch here.

These are gate and up of an expert, and the projections of latents to keys and to values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from aioserve.models.architecture import LatentAttention, Mixer, Tensor
from aioserve.models.stored import Floats, Format, IntegerForm, Rows, StoredLinear
from aioserve.models.weight_integers import WeightIntegers

__all__ = ["composed", "part_shapes"]


@dataclass(frozen=True, slots=True)
class _Behind(Format):
    """Rows of the part "first", then as many rows of the part "second"."""

    forms: tuple[Format, Format]
    """Formats of the parts. If they differ, rows are decoded to floats."""
    rows_of_each: int

    @property
    def name(self) -> str:
        return " behind ".join(dict.fromkeys(form.name for form in reversed(self.forms)))

    @property
    def title(self) -> str:
        return " and ".join(dict.fromkeys(form.title for form in self.forms))

    def integers(self, stored: StoredLinear) -> IntegerForm | None:
        first, second = self.forms
        return first.integers(_part(stored, "first", first)) if first == second else None

    def rows(self, stored: StoredLinear, first: int, end: int) -> Rows:
        found: list[Rows] = []
        for i, (name, form) in enumerate(zip(("first", "second"), self.forms, strict=True)):
            begin = i * self.rows_of_each
            low, high = max(first - begin, 0), min(end - begin, self.rows_of_each)
            if low < high:
                found.append(form.rows(_part(stored, name, form), low, high))
        if self.forms[0] != self.forms[1]:
            found = [_floats(rows) for rows in found]
        return found[0] if len(found) == 1 else _stacked(found[0], found[1])


@dataclass(frozen=True, slots=True)
class _Expansion(Format):
    """Keys, then values, of each head, as floats: `key_dim` rows, then `value_dim` rows.

    The part "keys" has the rows of each head transposed."""

    keys: Format
    values: Format
    key_dim: int
    value_dim: int

    @property
    def name(self) -> str:
        return f"{self.keys.name} transposed and {self.values.name}"

    @property
    def title(self) -> str:
        return " and ".join(dict.fromkeys((self.keys.title, self.values.title)))

    def integers(self, stored: StoredLinear) -> None:
        return None

    def rows(self, stored: StoredLinear, first: int, end: int) -> Floats:
        each, rank = self.key_dim + self.value_dim, stored.in_features
        begin, behind = first // each, -(-end // each)
        transposed = replace(_part(stored, "keys", self.keys), in_features=self.key_dim)
        keys = _floats(self.keys.rows(transposed, begin * rank, behind * rank))
        as_stored = _part(stored, "values", self.values)
        bounds = begin * self.value_dim, behind * self.value_dim
        values = _floats(self.values.rows(as_stored, *bounds))
        heads = (
            keys.reshape(-1, rank, self.key_dim).swapaxes(1, 2),
            values.reshape(-1, self.value_dim, rank),
        )
        found = np.concatenate(heads, axis=1).reshape(-1, rank)
        return found[first - begin * each : end - begin * each]


def part_shapes(mixer: Mixer, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a tensor's two parts in files, for a layer with this mixer."""
    if isinstance(mixer, LatentAttention):
        heads, rank = mixer.heads.query, mixer.latent_rank
        return (heads, rank, mixer.key_dim), (heads, mixer.value_dim, rank)
    half = tensor.rows // 2
    shape = (half,) if len(tensor.shape) == 1 else (half, tensor.columns)
    return shape, shape


def composed(
    mixer: Mixer, tensor: Tensor, first: StoredLinear, second: StoredLinear
) -> StoredLinear:
    """Describe the weight that two parts of a file make, given their own descriptions."""
    (one,), (other,) = first.parts.values(), second.parts.values()
    if isinstance(mixer, LatentAttention):
        form: Format = _Expansion(first.format, second.format, mixer.key_dim, mixer.value_dim)
        return StoredLinear(form, {"keys": one, "values": other}, tensor.rows, tensor.columns)
    form = _Behind((first.format, second.format), tensor.rows // 2)
    size = first.group_size if first.format == second.format else 0
    parts = {"first": one, "second": other}
    return StoredLinear(form, parts, tensor.rows, tensor.columns, size)


def _part(stored: StoredLinear, name: str, form: Format) -> StoredLinear:
    return replace(stored, format=form, parts={"weight": stored.parts[name]}, first_row=0)


def _floats(rows: Rows) -> Floats:
    return rows if isinstance(rows, np.ndarray) else rows.dequantized()


def _stacked(first: Rows, second: Rows) -> Rows:
    """Stack the rows of `second` below those of `first`. Both have the same format."""
    if not isinstance(first, WeightIntegers) or not isinstance(second, WeightIntegers):
        return np.concatenate((_floats(first), _floats(second)))
    minimums = None
    if first.minimums is not None and second.minimums is not None:
        minimums = np.concatenate((first.minimums, second.minimums))
    return replace(
        first,
        values=np.concatenate((first.values, second.values)),
        scales=np.concatenate((first.scales, second.scales)),
        minimums=minimums,
    )
