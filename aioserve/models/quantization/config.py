"""Choice of the scheme for a config.json's `quantization_config`, or for files that replace it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aioserve.models.fields import Fields, asks_nothing
from aioserve.models.quantization.awq import Awq
from aioserve.models.quantization.bitsandbytes import BitsAndBytes
from aioserve.models.quantization.compressed_tensors import CompressedTensors
from aioserve.models.quantization.fp8 import Fp8
from aioserve.models.quantization.gptq import Gptq
from aioserve.models.quantization.mxfp4 import Mxfp4Experts
from aioserve.models.quantization.scheme import Scheme

__all__ = ["FILES", "METHODS", "SAID", "ReadScheme", "read_scheme"]

ReadScheme = Callable[[Fields], Scheme | None]
"""Reads `quantization_config`; None where it leaves weights plain."""

METHODS: Mapping[str, ReadScheme] = {
    "awq": Awq.read,
    "bitsandbytes": BitsAndBytes.read,
    "compressed-tensors": CompressedTensors.read,
    "fbgemm_fp8": Fp8.read,
    "fp8": Fp8.read,
    "gptq": Gptq.read,
    "mxfp4": Mxfp4Experts.read,
}
SAID = "quantization_config"
"""Field of config.json."""
FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that may replace the field, with the method that is meant if they name none."""


def read_scheme(*places: Fields, known: Mapping[str, ReadScheme] = METHODS) -> Scheme | None:
    """Return the scheme in the first of `places` that has the field; None: weights are plain.

    They are plain, too, if the field is empty or quantises only the KV cache. Raises
    `UnsupportedModelError` for an unknown method or variant, and `ModelError` for a malformed
    field.
    """
    said = next((place.nested(SAID) for place in places if place.has(SAID)), None)
    if said is None or asks_nothing(said.values) or _leaves_weights_plain(said):
        return None
    method = said.text("quant_method", "")
    if not method and (said.values.get("load_in_4bit") or said.values.get("load_in_8bit")):
        method = "bitsandbytes"  # its first configs named no method
    if method not in known:
        said.unsupported(
            "quant_method",
            f"weights are read that are plain or of {', '.join(known)}; take the model "
            "that it was made from",
        )
    return known[method](said)


def _leaves_weights_plain(said: Fields) -> bool:
    """True if ModelOpt has quantised at most the KV cache."""
    if said.text("quant_method", "") != "modelopt":
        return False
    inside = said.values.get("quantization", said.values)
    return isinstance(inside, Mapping) and inside.get("quant_algo", "not said") in (None, "")
