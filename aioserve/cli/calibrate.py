"""`aioserve calibrate MODEL -o table.json`: measures step times on this machine, for the simulator.

Steps are measured in `_calibration.py` and fitted in `aioserve.simulation`.
"""

from __future__ import annotations

import asyncio
import sys
from importlib import metadata
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from cyclopts import Parameter
from msgspec.structs import replace

from aioserve.arguments import counted
from aioserve.cli._busy import Busy, MachineWatch
from aioserve.cli._calibration import (
    MOST_CONTEXT_TOKENS,
    MOST_PROMPTS,
    Grid,
    measure_grid,
    measure_host,
    measure_mixes,
    recorded_engine,
)
from aioserve.cli._engine import DeviceOptions, frozen_heap
from aioserve.cli._streams import check_output, json_text
from aioserve.cli.doctor import device_facts
from aioserve.errors import AioserveError, ConfigError
from aioserve.execution.runner import ModelLimits
from aioserve.paging.pages import pages_of_engine
from aioserve.progress_bar import bar_on_terminal
from aioserve.simulation.calibration import (
    MOST_MEDIAN_ERROR,
    MOST_TOTAL_ERROR,
    PredictionError,
    fit_table,
    prediction_error,
)
from aioserve.simulation.cost import HostTimes, MeasuredKV
from aioserve.simulation.cost_table_file import CostTableFile

__all__ = ["calibrate"]

PASSES = 2
THOROUGH_PASSES = 8
UNKNOWN_LENGTH = 1 << 30
"""Length of the model's context, before it is loaded."""
THOROUGH_CONTEXTS = 4
CONTEXTS_OF_A_GPU = 8
"""Factor of the measured contexts on a GPU. The time to compute prompts limits them."""
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
    max_model_len: int | None = None,
    page_size: int = 16,
    dtype: str = "auto",
    overlap: Annotated[bool, Parameter(negative="--no-overlap")] = True,
    seed: int = 0,
    on: DeviceOptions | None = None,
) -> None:
    """Measure what the engine's steps take with a model on this machine, and write a cost table.

    A table that predicts held-out steps badly is written too; the exit code is then 1.

    Args:

        model: A model directory, a GGUF file, an embedded model (pyhelp), random:30m, random:0.6b,
            or a hub id, which is downloaded unless it is in the local cache.
        output: The file for `aioserve simulate --cost-table`.
        thorough: Measure four times as long, and with contexts of four times as many tokens.
        max_num_seqs: Most sequences that decode at once.
        max_num_batched_tokens: Most tokens of one step.
        max_model_len: Longest context that is measured; the model's longest when not given.
        page_size: Tokens of one KV page.
        dtype: Data type of the weights: auto, float32, bfloat16 or, on a GPU, float16.
        overlap: Plan a step while the one before is running.
        seed: Key of the order of the measurements and of the held-out steps.
    """
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    Grid.up_to(max_num_batched_tokens, max_num_seqs, max_model_len or UNKNOWN_LENGTH)
    check_output("output", output)
    options = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "page_size": page_size,
        "dtype": dtype,
        "overlap": overlap,
        **(on or DeviceOptions()).of_engine(),
    }
    table, error, busy = asyncio.run(_measured(model, options, thorough, seed))
    output.write_text(json_text(table, indent=1) + "\n", encoding="utf-8")
    _print(output, table, error)
    if findings := busy.findings:
        sys.stdout.flush()
        print(
            f"aioserve: warning: the machine was busy, and {output} may be off: "
            f"{'; '.join(findings)}",
            file=sys.stderr,
            flush=True,
        )
    if error.is_poor:
        sys.stdout.flush()
        raise AioserveError(
            f"{output} is written, but is far off: a good table has a median error of at most "
            f"{MOST_MEDIAN_ERROR:.0%}, and of the sum at most {MOST_TOTAL_ERROR:.0%}; let the "
            f"machine do nothing else, or measure with --thorough"
        )


async def _measured(
    model: str, options: dict[str, Any], thorough: bool, seed: int
) -> tuple[CostTableFile, PredictionError, Busy]:
    # More sequence slots, for the prompts that come while the others decode.
    max_num_seqs, passes = options["max_num_seqs"], THOROUGH_PASSES if thorough else PASSES
    slots = max_num_seqs + MOST_PROMPTS
    watch = MachineWatch()
    async with recorded_engine(model, **options | {"max_num_seqs": slots}) as (engine, recorder):
        loaded, limits = engine.dump()["model"], engine.limits
        is_gpu = loaded["device"] != "cpu"
        kv = _kv_of(loaded, limits, options)
        grid = _grid_of(options, kv, is_gpu=is_gpu, thorough=thorough)
        fitted, held_out = [], []
        lone: list[HostTimes] = []
        rounds = passes * (grid.num_rounds + MIXED_REQUESTS) + is_gpu * grid.num_rounds
        done = count(1)
        with frozen_heap(), bar_on_terminal("measuring steps") as bar:  # as in a server

            def on_progress() -> None:
                if bar is not None:
                    bar(next(done), rounds)

            if is_gpu:
                # Kernels are compiled when a step first needs them.
                await measure_grid(engine, grid, seed + passes, on_progress)
                recorder.take()
            for number in range(passes):
                await measure_grid(engine, grid, seed + number, on_progress)
                fitted += recorder.take()
                lone.append(await measure_host(engine, recorder, seed + number))
                recorder.take()
                await measure_mixes(
                    engine, MIXED_REQUESTS, max_num_seqs, seed + number, on_progress
                )
                held_out += recorder.take()
                watch.probe()
    busy = watch.busy()
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
        **busy.facts,
    }
    host = HostTimes(
        *(median(getattr(each, name) for each in lone) for name in HostTimes.__struct_fields__)
    )
    return replace(table, kv=kv, host=host, measured=measured), error, busy


def _grid_of(options: dict[str, Any], kv: MeasuredKV, *, is_gpu: bool, thorough: bool) -> Grid:
    times = (THOROUGH_CONTEXTS if thorough else 1) * (CONTEXTS_OF_A_GPU if is_gpu else 1)
    return Grid.up_to(
        options["max_num_batched_tokens"],
        options["max_num_seqs"],
        kv.max_model_len,
        graphs=is_gpu,
        most_context_tokens=min(
            times * MOST_CONTEXT_TOKENS, kv.tokens_of(options["max_num_seqs"]) * 3 // 4
        ),
    )


def _kv_of(loaded: dict[str, Any], limits: ModelLimits, options: dict[str, Any]) -> MeasuredKV:
    """Return the KV memory of an engine that isn't being measured, so without the extra slots."""
    page_size, num_bytes = options["page_size"], loaded.get("kv_cache_bytes")
    windows = {"num_window_groups": limits.num_window_groups, "window": limits.window}
    used = pages_of_engine(
        options["max_num_seqs"],
        options["max_num_batched_tokens"],
        limits.max_model_len,
        page_size,
        **windows,
    )
    return MeasuredKV(
        num_pages=min(limits.num_pages, used),
        page_size=page_size,
        max_model_len=limits.max_model_len,
        bytes_per_token=num_bytes and num_bytes // (limits.num_pages * page_size),
        **windows,
    )


def _place(measured: dict[str, Any]) -> str:
    if measured["device"] == "cpu":
        return counted(int(measured["threads"]), "thread")
    return str(measured["card"])


def _range(table: CostTableFile) -> str:
    """Return how far contexts were measured, and how steps vary."""
    told: list[str] = []
    if table.kv is not None and table.max_context_tokens is not None:
        batch = table.decode_batch[-1]
        most = min(batch * table.kv.max_model_len, table.kv.tokens_of(batch))
        told.append(
            f"decoding was measured with up to {table.max_context_tokens:,} tokens of context, of "
            f"{most:,} that fit"
        )
    if (noise := table.table().step_noise) is not None:
        low, high = noise.percentiles(0, 1, (10, 90))
        told.append(f"steps of one sequence vary by {low:.2f} to {high:.2f} (p10 to p90)")
    told.append(str(table.host))
    return "; ".join(told)


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
        f"{_range(table)}\n"
        f"{counted(error.steps, 'other step', form=',')} of random mixes are told with an error of "
        f"{error.median:.1%} (median), {error.p90:.1%} (p90), and their sum with {error.total:+.1%}"
    )
