"""`aioserve evaluate MODEL --text FILE`: perplexity on a text, and divergence with `--reference`.

The measurements are in `_evaluation/`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from aioserve.cli._engine import DeviceOptions
from aioserve.cli._evaluation.measuring import Options, check, measure
from aioserve.cli._evaluation.results import print_tables, result_of
from aioserve.cli._evaluation.text import read_text
from aioserve.cli._models import check_model
from aioserve.cli._streams import check_output, json_text
from aioserve.errors import ConfigError

__all__ = ["evaluate"]


def evaluate(
    model: str,
    /,
    *,
    text: Path,
    reference: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    second_halves: Annotated[bool, Parameter(negative=())] = False,
    max_tokens: int | None = None,
    concurrency: int = 16,
    dtype: str = "auto",
    reference_dtype: str | None = None,
    reference_architecture: str | None = None,
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    on: DeviceOptions | None = None,
) -> None:
    """Measure a model's perplexity on a text, and its divergence from another model.

    Args:

        model: A model directory, a GGUF file, an embedded model (pyhelp), random:30m, or a hub id,
            which is downloaded unless it is in the local cache.
        text: A file in UTF-8, at most 16 MiB.
        reference: A model with the same tokenizer, to compare with. Shown are the ratio of
            perplexities, KL(reference || model) over the whole vocabulary, and the share of tokens
            at which both have the same most likely token. It is used as it is stored:
            --quantization and --architecture are for MODEL alone.
        context: Tokens of a window, the BOS before it included; 512 when not given, or as many as
            the model takes.
        stride: Tokens from a window to the next; half of the context when not given. A token has at
            least context - stride tokens of context.
        second_halves: Cut the text into chunks and score only the second half of each, as
            llama.cpp's perplexity does. This replaces windows with a stride.
        max_tokens: Evaluate only this many tokens of the text, its first.
        concurrency: Windows at once.
        dtype: Data type of the weights: auto, float32, bfloat16 or, on a GPU, float16.
        reference_dtype: Data type of the reference's weights; auto when not given.
        reference_architecture: --architecture of the reference.
        json: Also write the result to this file; "-" prints JSON alone.
        on: Device options of both models, and the quantization of MODEL.
    """
    options = Options(context, stride, second_halves, max_tokens, concurrency)
    check(options)
    if reference is None:
        for name, given in (
            ("reference_dtype", reference_dtype),
            ("reference_architecture", reference_architecture),
        ):
            if given is not None:
                raise ConfigError(f"{name} goes with --reference", argument=name)
    if json not in (None, "-"):
        check_output("json", Path(json))
    contents = read_text(text)
    places = (on or DeviceOptions()).of_engine()
    models = [(model, places | {"dtype": dtype})]
    if reference is not None:
        as_stored = {
            "dtype": reference_dtype or "auto",
            "architecture": reference_architecture,
            "quantization": None,
            "activation_quantization": "auto",
        }
        models.append((reference, places | as_stored))
    for name, _ in models:
        check_model(name)
    measured = asyncio.run(measure(models, contents, options))
    result = result_of(measured, [Path(name).name for name, _ in models], text)
    if json == "-":
        print(json_text(result))
        return
    print_tables(result)
    if json is not None:
        Path(json).write_text(json_text(result) + "\n", encoding="utf-8")
