"""Measures the limits of this machine, and how much of them an engine reaches.

Two limits are measured. One is how fast all threads together read memory that no cache holds. The
other is how many multiplications and additions a second the best large matrix product makes, of
this package's kernels and torch's. A step can't take less time than its bytes and its operations
do. The column `limit` is the sum of that over the steps that the engine ran, and `share` is limit /
seconds. The equation is in `aioserve.simulation.cost.RooflineCost`. The phase `prompts` lasts until
the last step that has a prompt in it, `answers` from there on.

The step program measures each kind of op. This shows where the time goes, in percent:

    linear      the linear layers, with norms and activations that are fused into them
    attention   with rotary and KV write
    rowwise     what else is done row by row
    step        the rest of the steps: what of it is Python on the step thread
    host        between the steps: planning, delivering

    python benchmarks/limits.py                       the machine's limits alone
    python benchmarks/limits.py --model DIR --dtype bfloat16
    python benchmarks/limits.py --model DIR --workloads "one stream" prompt --json limits.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from machine_limits import PRODUCT_SECONDS, READ_MIB, cost_of, measure_limits

from aioserve import Engine, SamplingParams, _native
from aioserve.config import EngineConfig
from aioserve.execution.loading.cpu import CpuPlacement
from aioserve.execution.loading.place import place_model
from aioserve.execution.runner import LoadedModel, Text
from aioserve.execution.timed_runner import TimedRunner, TimedStep
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from aioserve.ops.native_program import NativeProgram
from aioserve.simulation.roofline import RooflineCost

SHARES = ("linear", "attention", "rowwise", "step", "host")


@dataclass(frozen=True)
class Workload:
    """Requests that come at once, of random tokens."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        source = random.Random(f"{self.name} {seed}")
        return [
            [source.randrange(vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]


@dataclass(frozen=True)
class Phase:
    """Part of a run: its time, and the least time of its steps."""

    name: str
    seconds: float
    limit_seconds: float
    tokens: int

    @property
    def share(self) -> float:
        return self.limit_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


# -- an engine whose steps are recorded


class NotedModel:
    """Loads a model for an engine, and records every step and the time of its ops."""

    def __init__(self, model: str, dtype: str) -> None:
        self.steps: list[TimedStep] = []
        self._model, self._dtype = model, dtype
        self._program: NativeProgram | None = None

    async def load(self, config: EngineConfig, *, num_slots: int) -> LoadedModel:
        backend = backend_named("native")
        decoder = await asyncio.to_thread(
            load_model, self._model, dtype=self._dtype, backend=backend
        )
        if not isinstance(decoder.program, NativeProgram):
            raise TypeError(f"the program must be the native backend's, got {decoder.program}")
        self._program = decoder.program
        text = Text(None, None, "token ids are all it takes")
        loaded = await place_model(
            self._model, decoder, text, config, CpuPlacement(), num_slots=num_slots, seconds={}
        )
        return msgspec.structs.replace(loaded, runner=TimedRunner(loaded.runner, self.steps.append))

    @property
    def program(self) -> NativeProgram:
        if self._program is None:
            raise RuntimeError("the model is not loaded")
        return self._program

    def begin(self) -> None:
        """Record and count from here on."""
        self.steps.clear()
        self.program.measure(True)

    def op_seconds(self, began: float, ended: float) -> dict[str, float]:
        """Return the seconds between these times since `begin`, by the keys `SHARES`."""
        ops = {name: spent / 1e9 for name, spent in self.program.nanoseconds.items()}
        in_steps = sum(step.seconds for step in self.steps)
        ops["step"] = in_steps - sum(ops.values())
        ops["host"] = ended - began - in_steps
        return ops


# -- the workloads


async def run(engine: Engine, workload: Workload, seed: int) -> tuple[float, float]:
    """Return the time at which it began, and that when all answers had ended."""
    params = SamplingParams(max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)

    async def answer(prompt: list[int]) -> None:
        count = 0
        async for _ in engine.stream(prompt, params):
            count += 1
        if count != workload.output_tokens:
            raise RuntimeError(f"{count} tokens instead of {workload.output_tokens}")

    prompts = workload.prompts(engine.limits.vocab_size, seed)
    began = time.perf_counter()
    await asyncio.gather(*map(answer, prompts))
    return began, time.perf_counter()


def phases_of(
    workload: Workload, steps: list[TimedStep], began: float, ended: float, cost: RooflineCost
) -> list[Phase]:
    with_prompts = [
        index
        for index, step in enumerate(steps)
        if any(item.start < workload.prompt_tokens for item in step.plan.items)
    ]
    split = with_prompts[-1] + 1
    between = steps[split - 1].ended
    limits = [cost.step_seconds(step.plan) for step in steps]
    prompt_tokens = workload.requests * workload.prompt_tokens
    found = [Phase("prompts", between - began, sum(limits[:split]), prompt_tokens)]
    if steps[split:]:
        tokens = sum(len(item.rows) for step in steps[split:] for item in step.plan.items)
        found.append(Phase("answers", ended - between, sum(limits[split:]), tokens))
    return found


async def measure(
    model: str, dtype: str, workload: Workload, cost: RooflineCost, repeats: int
) -> tuple[list[Phase], dict[str, float]]:
    """Return the phases of the quickest of `repeats` runs, and how its seconds were spent."""
    source = NotedModel(model, dtype)
    best: tuple[list[Phase], dict[str, float]] = [], {}
    quickest = float("inf")
    async with Engine(source) as engine:
        await warm(engine, workload)
        for seed in range(repeats):
            source.begin()
            began, ended = await run(engine, workload, seed)
            if ended - began < quickest:
                quickest = ended - began
                phases = phases_of(workload, source.steps, began, ended, cost)
                best = phases, source.op_seconds(began, ended)
    return best


async def warm(engine: Engine, workload: Workload) -> None:
    """Do all work that is done once: the thread pool, the kernels' choice, pages of memory."""
    await run(engine, Workload("warm", workload.requests, workload.prompt_tokens, 2), 0)


def main() -> None:
    options = parse_arguments()
    if options.threads is not None:
        _native.set_num_threads(options.threads)
    cpu = _native.cpu_info()
    torch.set_num_threads(cpu["threads"])
    dtype = getattr(torch, options.dtype)
    limits = measure_limits(dtype, options.product_seconds, options.read_mib)
    print(
        f"{options.dtype}, {cpu['threads']} threads, {cpu['isa']}: reads "
        f"{limits.bytes_per_second / 1e9:.1f} GB/s, multiplies "
        f"{limits.flops_per_second / 1e9:.0f} GFLOP/s ({limits.fastest_product})"
    )
    results: list[dict[str, Any]] = []
    if options.model is not None:
        cost = cost_of(options.model, dtype, limits)
        print_head(options.model)
        for workload in chosen(options):
            phases, ops = asyncio.run(
                measure(options.model, options.dtype, workload, cost, options.repeats)
            )
            print_rows(workload, phases, ops)
            results.append(
                {
                    "workload": asdict(workload),
                    "phases": [{**asdict(phase), "share": phase.share} for phase in phases],
                    "op_seconds": ops,
                }
            )
    if options.json is not None:
        written = {"dtype": options.dtype, "limits": asdict(limits), "results": results}
        Path(options.json).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def print_head(model: str) -> None:
    print(
        f"\n{Path(model).name:<12} {'':<8} {'seconds':>8} {'limit':>8} {'share':>6} {'tokens/s':>9}"
        f"  {' '.join(f'{name:>9}' for name in SHARES)}"
    )


def print_rows(workload: Workload, phases: list[Phase], ops: dict[str, float]) -> None:
    whole = sum(ops.values())
    shares = " ".join(f"{100 * ops[name] / whole:9.1f}" for name in SHARES)
    for index, phase in enumerate(phases):
        print(
            f"{'' if index else workload.name:<12} {phase.name:<8} {phase.seconds:8.3f} "
            f"{phase.limit_seconds:8.3f} {phase.share:6.2f} {phase.tokens_per_second:9.1f}"
            f"  {'' if index else shares}".rstrip(),
            flush=True,
        )


def chosen(options: argparse.Namespace) -> list[Workload]:
    prompt, output = options.prompt_tokens, options.output_tokens
    every = {
        workload.name: workload
        for workload in (
            Workload("one stream", 1, prompt, output),
            Workload("many", options.streams, prompt, output),
            Workload("prompt", 1, options.long_prompt_tokens, 1),
        )
    }
    return [every[name] for name in options.workloads]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="DIR", help="its weights may be random")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, help="of the pool; as many as there are by default")
    names = ("one stream", "many", "prompt")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--streams", type=int, default=32, help="requests of `many`")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--long-prompt-tokens", type=int, default=2048, help="of `prompt`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--product-seconds", type=float, default=PRODUCT_SECONDS, help="for each product"
    )
    parser.add_argument("--read-mib", type=int, default=READ_MIB, help="memory that is read")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
