"""Rounding of plain weights while they are read: the option `quantization` of an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aioserve.errors import ConfigError, WeightsError
from aioserve.models.architecture import Architecture, Tensor
from aioserve.models.quantization.packing import E4M3, e4m3_bits, e4m3_scales
from aioserve.models.quantization.rounding import FORMS, quotients, round_to_integers
from aioserve.models.stored import (
    CodeForm,
    Format,
    IntegerForm,
    Plain,
    StoredLinear,
    StoredWeights,
)
from aioserve.models.weight_codes import WeightCodes
from aioserve.models.weight_integers import WeightIntegers

__all__ = ["QuantizedWhileLoading", "RoundedFloats8"]

HEAD_METHOD = "int8"
"""Method for the output layer, whose errors reach the logits undamped, and for a tied embedding."""


@dataclass(frozen=True, slots=True)
class Rounded(Format):
    """Plain floats that become integers of `form` while they are read."""

    plain: Plain
    form: IntegerForm

    @property
    def name(self) -> str:
        return f"int{self.form.bits}-g{self.form.group_size}"

    def integers(self, stored: StoredLinear) -> IntegerForm:
        return self.form

    def rows(self, stored: StoredLinear, first: int, end: int) -> WeightIntegers:
        floats = self.plain.rows(stored, first, end)
        try:
            return round_to_integers(floats, self.form)
        except WeightsError as error:
            raise WeightsError(f"{stored.name}: {error}") from error


@dataclass(frozen=True, slots=True)
class RoundedFloats8(Format):
    """Plain floats that become E4M3, with a scale for each output, while they are read."""

    plain: Plain

    @property
    def name(self) -> str:
        return "fp8-e4m3"

    def integers(self, stored: StoredLinear) -> None:
        return None

    def codes(self, stored: StoredLinear) -> CodeForm:
        return CodeForm(stored.in_features)

    def rows(self, stored: StoredLinear, first: int, end: int) -> WeightCodes:
        floats = self.plain.rows(stored, first, end)
        try:
            scales = e4m3_scales(floats)
        except WeightsError as error:
            raise WeightsError(f"{stored.name}: {error}") from error
        codes = e4m3_bits(quotients(floats, scales))
        return WeightCodes(codes, E4M3, scales, stored.in_features)


def _rounded(plain: Plain, method: str) -> Rounded | RoundedFloats8:
    return RoundedFloats8(plain) if method == "fp8" else Rounded(plain, FORMS[method])


class QuantizedWhileLoading(StoredWeights):
    """Weights `stored`, with linear layers quantised by `method` and the head by `HEAD_METHOD`.

    Norms, biases, learned positions and an untied embedding stay floats. Raises `ConfigError` if a
    weight is already quantised in the files, or stored in turns.
    """

    def __init__(self, stored: StoredWeights, architecture: Architecture, method: str) -> None:
        self._stored = stored
        self.total_bytes: int = stored.total_bytes
        self.dtype: str = stored.dtype
        self._formats: dict[Tensor, Rounded | RoundedFloats8] = {}
        for tensor, chosen in _methods(architecture, method).items():
            if tensor not in stored:
                continue
            plain = stored[tensor].format
            if tensor.turns is not None:
                raise ConfigError(
                    f"quantization={method!r} must be left out with a model that stores rows of "
                    f"several projections in turns, as {tensor.name}",
                    argument="quantization",
                    value=method,
                )
            if not isinstance(plain, Plain):
                raise ConfigError(
                    f"quantization={method!r} must be left out with a model whose weights are "
                    f"quantised already: {tensor.name} is {plain.name}",
                    argument="quantization",
                    value=method,
                )
            self._formats[tensor] = _rounded(plain, chosen)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._stored

    def __getitem__(self, tensor: Tensor) -> StoredLinear:
        stored, rounded = self._stored[tensor], self._formats.get(tensor)
        if rounded is None:
            return stored
        form = rounded.integers(stored)
        size = stored.in_features if form is None else form.group_size
        return replace(stored, format=rounded, group_size=size)

    def close(self) -> None:
        self._stored.close()


def _methods(architecture: Architecture, method: str) -> dict[Tensor, str]:
    methods = {architecture.head: HEAD_METHOD}
    if architecture.tie_word_embeddings:
        methods[architecture.embedding] = HEAD_METHOD
    for described in architecture.rounded_linears:
        methods |= dict.fromkeys(described.weights, method)
    return methods
