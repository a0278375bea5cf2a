"""`aioserve quantize MODEL OUT --method METHOD`: a copy of a model with weights of fewer bits, in a
format that other engines read as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from aioserve.cli._interrupts import cleaning_up_first
from aioserve.cli._models import check_model, local_model
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import method_named
from aioserve.models.resolve import resolve
from aioserve.progress_bar import bar_on_terminal

__all__ = ["quantize"]


def quantize(
    model: str,
    out: Path,
    /,
    *,
    method: Literal["int8", "w8a8", "w4a16", "fp8"],
    group_size: int | None = None,
) -> None:
    """Write a copy of a model whose linear layers have weights of fewer bits.

    The copy is a directory in the format compressed-tensors, which other engines read as well.
    Embedding and output layer stay as they are.

    Args:
        model: A model directory with plain weights, an embedded model (pyhelp), random:30m, or a
            hub id, which is downloaded where it isn't in the local cache.
        out: The directory to write; it must be empty or not be there.
        method: int8: integers of 8 bits with a scale for each output. w8a8: the same, and
            engines round activations to 8 bits, too. w4a16: integers of 4 bits in groups. fp8:
            floats of 8 bits (E4M3), for activations as well.
        group_size: Inputs that share a scale with w4a16: 32, 64 or 128; 32 when not given.
    """
    chosen = method_named(method, group_size)
    check_model(model, None)
    path = resolve(local_model(model))
    with cleaning_up_first(), bar_on_terminal("quantising") as progress:
        written = write_quantized_copy(path, out, chosen, progress=progress)
    files = "1 file" if written.num_files == 1 else f"{written.num_files} files"
    share = 100 * written.written_bytes / written.read_bytes
    print(
        f"{out}: {method}, {written.written_bytes} bytes of weights in {files}, {share:.0f} % of "
        f"the {written.read_bytes} bytes of {model}"
    )
