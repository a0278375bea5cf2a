"""`aioserve calibrate MODEL -o table.json`: what steps take here, for the simulator.

How steps are measured is in `_calibration.py`, how they are fitted in `aioserve.simulation`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from aioserve.cli._device_options import DeviceOptions
from aioserve.cli._streams import check_output, json_text
from aioserve.errors import AioserveError, ConfigError

if TYPE_CHECKING:
    from aioserve.simulation.calibration import PredictionError
    from aioserve.simulation.cost import CostTableFile

__all__ = ["calibrate"]

PASSES = 2
THOROUGH_PASSES = 8
UNKNOWN_LENGTH = 1 << 30
"""Of the model's context, before it is loaded."""
MIXED_REQUESTS = 48
"""Random requests after each pass over the grid."""


def calibrate(
    model: str = "pyhelp",
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    thorough: Annotated[bool, Parameter(negative=())] = False,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 2048,
    page_size: int = 16,
    dtype: str = "auto",
    overlap: Annotated[bool, Parameter(negative="--no-overlap")] = True,
    seed: int = 0,
    on: DeviceOptions | None = None,
) -> None:
    """Measure what the engine's steps take with a model on this machine, and write a cost table.

    A table that is far off the steps that it was not made of is written too; the exit code is 1.

    Args:
        model: A model directory, embedded model, hub id in the local cache, or random:30m,
            random:0.6b.
        output: The file for `aioserve simulate --cost-table`.
        thorough: Measure four times as long.
        max_num_seqs: Most sequences that decode at once.
        max_num_batched_tokens: Tokens of one step.
        page_size: Tokens of one KV page.
        dtype: Of the weights: auto, float32, bfloat16 or, on a GPU, float16.
        overlap: Plan a step while the one before is running.
        seed: Decides the order of the measurements and what the held-out steps are.
    """
    from aioserve.cli._calibration import Grid

    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    Grid.up_to(max_num_batched_tokens, max_num_seqs, UNKNOWN_LENGTH)
    check_output("output", output)
    options = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "page_size": page_size,
        "dtype": dtype,
        "overlap": overlap,
        **(on or DeviceOptions()).of_engine(),
    }
    passes = THOROUGH_PASSES if thorough else PASSES
    table, error = asyncio.run(_measured(model, options, passes, seed))
    output.write_text(json_text(table, indent=1) + "\n", encoding="utf-8")
    _print(output, table, error)
    if error.is_poor:
        from aioserve.simulation.calibration import MOST_MEDIAN_ERROR, MOST_TOTAL_ERROR

        sys.stdout.flush()
        raise AioserveError(
            f"{output} is written, but is far off: a good table has a median error of at most "
            f"{MOST_MEDIAN_ERROR:.0%}, and of the sum at most {MOST_TOTAL_ERROR:.0%}; let the "
            f"machine do nothing else, or measure with --thorough"
        )


async def _measured(
    model: str, options: dict[str, Any], passes: int, seed: int
) -> tuple[CostTableFile, PredictionError]:
    from importlib import metadata

    from msgspec.structs import replace

    from aioserve.cli._calibration import Grid, measure_grid, measure_mixes, recorded_engine
    from aioserve.cli._machine import device_facts
    from aioserve.simulation.calibration import fit_table, prediction_error

    # One more seat, for the prompts that come while the others decode.
    seats = options["max_num_seqs"] + 1
    async with recorded_engine(model, **options | {"max_num_seqs": seats}) as (engine, recorder):
        loaded = engine.dump()["model"]
        is_gpu = loaded["device"] != "cpu"
        grid = Grid.up_to(
            options["max_num_batched_tokens"],
            seats - 1,
            engine.limits.max_model_len,
            graphs=is_gpu,
        )
        fitted, held_out = [], []
        rounds = passes * (grid.num_rounds + MIXED_REQUESTS) + is_gpu * grid.num_rounds
        with _bar(rounds) as on_progress:
            if is_gpu:
                # Kernels are compiled when a step first needs them.
                await measure_grid(engine, grid, seed + passes, on_progress)
                recorder.take()
            for number in range(passes):
                await measure_grid(engine, grid, seed + number, on_progress)
                fitted += recorder.take()
                await measure_mixes(engine, MIXED_REQUESTS, seats, seed + number, on_progress)
                held_out += recorder.take()
    table = fit_table(fitted, grid.prefill_tokens, grid.decode_batch)
    error = prediction_error(table.table(), held_out)
    measured = {
        "model": Path(model).name,
        **options,
        "dtype": loaded["dtype"],
        **device_facts(loaded["device"]),
        "aioserve": metadata.version("aioserve"),
        "steps": len(fitted),
        "held_out_steps": error.steps,
        "held_out_median_error": round(error.median, 4),
        "held_out_p90_error": round(error.p90, 4),
        "held_out_total_error": round(error.total, 4),
    }
    return replace(table, measured=measured), error


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A function that moves a bar on stderr on by one; without a terminal, it does nothing."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring steps", total=total)
        yield lambda: bar.advance(task)


def _place(measured: dict[str, Any]) -> str:
    if measured["device"] == "cpu":
        return f"{measured['threads']} threads"
    return str(measured["card"])


def _print(output: Path, table: CostTableFile, error: PredictionError) -> None:
    measured, seconds = table.measured, table.seconds
    largest = table.prefill_tokens[-1], table.decode_batch[-1]
    print(
        f"{output}: {measured['steps']:,} steps of {measured['model']}, {measured['dtype']}, "
        f"{_place(measured)}\n"
        f"one sequence decodes in {seconds[0][1] * 1e3:.2f} ms, {largest[1]} in "
        f"{seconds[0][-1] * 1e3:.2f} ms, and {largest[0]:,} prompt tokens take "
        f"{seconds[-1][0] * 1e3:.2f} ms; each 1,000 tokens of context add "
        f"{table.seconds_per_context_token * 1e6:.3f} ms to decoding\n"
        f"{error.steps:,} other steps of random mixes are told with an error of "
        f"{error.median:.1%} (median), {error.p90:.1%} (p90), and their sum with {error.total:+.1%}"
    )
