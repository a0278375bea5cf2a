"""Which format each tensor of a quantised GGUF file has: the mixtures that llama.cpp's files have.

Where a format needs more columns in a row than a tensor has, one of about as many bits with shorter
blocks takes its place.
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
    """One type of file."""

    number: int
    """As files spell it (`general.file_type`)."""
    most: str
    """Format of most matrices."""
    output: str
    """Format of the output layer, and of an embedding that is the output layer."""
    sensitive: str | None = None
    """Format of values and down projections in about half of the layers; None: as the others."""
    fused: str | None = None
    """Format of queries, keys and values in one matrix; None: as the others."""

    def form(
        self, name: str, columns: int, layer: int | None, num_layers: int, *, is_output: bool
    ) -> GGUFFormat:
        """Format of a matrix. `name` is what its file calls it, without the layer's number; `layer`
        None: it is in no layer."""
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
    """The first and the last eighth of the layers, and every third between."""
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
"""Types of files by their names."""
