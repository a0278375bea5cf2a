"""Mixtures of formats in quantised GGUF files, as in llama.cpp.

If the rows of a tensor are not whole blocks of a format, one of about as many bits with shorter
blocks replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aioserve.models.gguf.formats import FORMATS, GGUFFormat

__all__ = ["MIXES", "Mix"]

_BY_NAME = {form.name: form for form in FORMATS.values()}
_SHORTER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_SENSITIVE = ("attn_v", "ffn_down")


@dataclass(frozen=True, slots=True)
class Mix:
    """Formats of one type of file."""

    number: int
    """Number of the type in files (`general.file_type`)."""
    most: str
    """Format of most matrices."""
    output: str
    """Format of the output layer, and of an embedding that is also the output layer."""
    sensitive: str | None = None
    """Format of values and down projections in about half of the layers; None: `most`."""
    fused: str | None = None
    """Format of matrices that fuse queries, keys and values; None: `most`."""

    def form(
        self, name: str, columns: int, layer: int | None, num_layers: int, *, is_output: bool
    ) -> GGUFFormat:
        """Choose the format of a matrix by its `name` in files, without the number of the layer.

        `layer` is None for matrices outside of layers."""
        wanted = self.output if is_output else self.most
        if self.sensitive is not None and name in _SENSITIVE and layer is not None:
            wanted = self.sensitive if _gets_more(layer, num_layers) else self.most
        if self.fused is not None and name == "attn_qkv":
            wanted = self.fused
        form = _BY_NAME[wanted]
        while columns % form.values_per_block:
            form = _BY_NAME[_SHORTER.get(form.name, "F16")]
        return form


def _gets_more(layer: int, num_layers: int) -> bool:
    """True for the first and the last eighth of the layers, and every third one between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


MIXES: Mapping[str, Mix] = {
    "F16": Mix(1, "F16", "F16"),
    "BF16": Mix(32, "BF16", "BF16"),
    "Q8_0": Mix(7, "Q8_0", "Q8_0"),
    "Q6_K": Mix(18, "Q6_K", "Q6_K"),
    "Q5_K_M": Mix(17, "Q5_K", "Q6_K", sensitive="Q6_K", fused="Q6_K"),
    "Q5_1": Mix(9, "Q5_1", "Q6_K"),
    "Q5_0": Mix(8, "Q5_0", "Q6_K"),
    "Q4_K_M": Mix(15, "Q4_K", "Q6_K", sensitive="Q6_K", fused="Q5_K"),
    "Q4_1": Mix(3, "Q4_1", "Q6_K"),
    "Q4_0": Mix(2, "Q4_0", "Q6_K"),
}
"""Types of files, by name."""
