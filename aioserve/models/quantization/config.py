"""Which scheme a config.json's `quantization_config` asks for."""

from __future__ import annotations

from collections.abc import Callable

from aioserve.models.fields import Fields
from aioserve.models.quantization.awq import Awq
from aioserve.models.quantization.compressed_tensors import CompressedTensors
from aioserve.models.quantization.fp8 import Fp8
from aioserve.models.quantization.gptq import Gptq
from aioserve.models.quantization.scheme import Scheme

__all__ = ["METHODS", "read_scheme"]

METHODS: dict[str, Callable[[Fields], Scheme]] = {
    "awq": Awq.read,
    "compressed-tensors": CompressedTensors.read,
    "fbgemm_fp8": Fp8.read,
    "fp8": Fp8.read,
    "gptq": Gptq.read,
}


def read_scheme(*places: Fields) -> Scheme | None:
    """The scheme of the first of the places that says one; None: weights are plain.

    Raises `UnsupportedModelError` for a method, or a variant of one, that isn't read, and
    `ModelError` for a malformed field.
    """
    for fields in places:
        if fields.has("quantization_config"):
            said = fields.nested("quantization_config")
            method = said.text("quant_method", "")
            if method not in METHODS:
                said.unsupported(
                    "quant_method",
                    f"weights are read that are plain or of {', '.join(METHODS)}; take the model "
                    "that it was made from",
                )
            return METHODS[method](said)
    return None
