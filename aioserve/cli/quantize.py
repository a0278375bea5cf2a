"""`aioserve quantize MODEL OUT --method METHOD`: writes a copy of a model with weights of fewer
bits, in a format that other engines read as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aioserve.cli._calibration_text import calibration_windows
from aioserve.cli._interrupts import cleaning_up_first, leaving_at_once
from aioserve.cli._models import check_model, local_model
from aioserve.errors import ConfigError
from aioserve.models.files import model_files
from aioserve.models.gguf.copy import write_gguf
from aioserve.models.gguf.mixes import MIXES, Mix
from aioserve.models.quantization.method import CALIBRATED
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import method_named
from aioserve.models.resolve import resolve
from aioserve.progress_bar import bar_on_terminal

if TYPE_CHECKING:
    from aioserve.models.quantization.method import Method

__all__ = ["quantize"]

GGUF = "gguf:"
"""Prefix of the methods that write one GGUF file."""


def quantize(
    model: str,
    out: Path,
    /,
    *,
    method: Literal[
        "int8",
        "w8a8",
        "w4a16",
        "fp8",
        "gptq",
        "awq",
        "gguf:F16",
        "gguf:BF16",
        "gguf:Q8_0",
        "gguf:Q6_K",
        "gguf:Q5_K_M",
        "gguf:Q5_1",
        "gguf:Q5_0",
        "gguf:Q4_K_M",
        "gguf:Q4_1",
        "gguf:Q4_0",
    ],
    group_size: int | None = None,
    calibration: Path | None = None,
    calibration_tokens: int | None = None,
    smoothquant: float | None = None,
) -> None:
    """Write a copy of a model whose linear layers have weights of fewer bits.

    The copy is a directory in a format that other engines read as well: compressed-tensors, GPTQ or
    AWQ. Embedding and output layer stay unchanged there. With gguf it is one GGUF file with all of
    the model.

    Args:

        model: A model directory with plain weights, an embedded model (pyhelp), random:30m, or a
            hub id, which is downloaded unless it is in the local cache.
        out: The directory to write; it must be empty or not be there. With gguf a file that ends
            with .gguf and is not there.
        method: int8: integers of 8 bits with a scale for each output. w8a8: the same, and
            engines round activations to 8 bits, too. w4a16: integers of 4 bits in groups. fp8:
            floats of 8 bits (E4M3), for activations as well. gptq, awq: integers of 4 bits in
            groups that are chosen with --calibration, so that the model loses less. gguf:TYPE: the
            mixture of formats that files of that type have.
        group_size: Inputs that share a scale with w4a16, gptq and awq: 32, 64 or 128; when not
            given 32 with w4a16, else 128.
        calibration: A text like those that the model will read: a file in UTF-8, or .jsonl with
            "text" or "messages" in each line. Needed by gptq and awq, optional with w8a8.
        calibration_tokens: Most tokens of it, taken from all over the file; 32768 when not given.
        smoothquant: With w8a8 and --calibration: how much of the size of activations moves to the
            weights, from 0 to 1; 0.5 when not given.
    """
    _check(method, calibration, calibration_tokens, smoothquant)
    check_model(model)
    path = resolve(local_model(model))
    chosen: Method | Mix
    if method.startswith(GGUF):
        chosen = _mix(method, group_size)
    elif calibration is None:
        chosen = method_named(method, group_size)
    else:
        chosen = _calibrated(path, method, group_size, calibration, calibration_tokens, smoothquant)
    with cleaning_up_first(), bar_on_terminal("quantising") as progress:
        if isinstance(chosen, Mix):
            written = write_gguf(path, out, chosen, progress=progress)
        else:
            written = write_quantized_copy(path, out, chosen, progress=progress)
    files = "1 file" if written.num_files == 1 else f"{written.num_files} files"
    share = 100 * written.written_bytes / written.read_bytes
    print(
        f"{out}: {method}, {written.written_bytes} bytes of weights in {files}, {share:.0f} % of "
        f"the {written.read_bytes} bytes of {model}"
    )


def _check(
    method: str,
    calibration: Path | None,
    calibration_tokens: int | None,
    smoothquant: float | None,
) -> None:
    """Raise `ConfigError` for options that don't go together."""
    takes_text = (*CALIBRATED, "w8a8")
    if calibration is None and method in CALIBRATED:
        raise ConfigError(
            f"calibration must be a text file with method {method}", argument="calibration"
        )
    if calibration is not None and method not in takes_text:
        raise ConfigError(
            f"calibration goes with method {', '.join(takes_text)}, not with {method}",
            argument="calibration",
            value=str(calibration),
        )
    if calibration_tokens is not None and calibration is None:
        raise ConfigError(
            "calibration_tokens goes with --calibration", argument="calibration_tokens"
        )
    if smoothquant is None:
        return
    if method != "w8a8" or calibration is None:
        raise ConfigError(
            "smoothquant goes with method w8a8 and --calibration",
            argument="smoothquant",
            value=smoothquant,
        )
    if not 0 <= smoothquant <= 1:
        raise ConfigError(
            f"smoothquant must be in [0, 1], got {smoothquant}",
            argument="smoothquant",
            value=smoothquant,
            limit=0 if smoothquant < 0 else 1,
        )


def _mix(method: str, group_size: int | None) -> Mix:
    if group_size is not None:
        raise ConfigError(
            f"group_size must be left out with method {method}: its formats have groups of "
            f"their own",
            argument="group_size",
            value=group_size,
        )
    return MIXES[method.removeprefix(GGUF)]


def _calibrated(
    path: Path,
    method: str,
    group_size: int | None,
    calibration: Path,
    calibration_tokens: int | None,
    smoothquant: float | None,
) -> Method:
    windows = calibration_windows(model_files(path), calibration, calibration_tokens)
    with leaving_at_once():
        from aioserve.models.quantization.calibrated.methods import calibrated_method
    return calibrated_method(method, group_size, windows, smoothquant)
