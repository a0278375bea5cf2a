"""Runs the same work on aioserve and on transformers, and prints the ratio of their speeds.

Each engine runs in a child process of its own, one after the other and in turn, `--repeats` times.
The best run of each counts, since other work of the machine only ever makes a run slower
(`--statistic median` takes the middle one). A child loads the model, runs each case once in small
to warm up, and then once for the clock. Prompts are random ids, the same for both engines. Decoding
is greedy and goes past end-of-sequence tokens, so both engines do the same number of steps.

    case          prompts   prompt ids   answer ids   what is reported
    single              1           32          128   answer ids / seconds
    concurrent         32          128          128   answer ids of all / seconds
    prefill             1        2,048            1   prompt ids / seconds

Seconds run from the first call to the last id, so `single` and `concurrent` include the computation
of the prompt. Transformers gets `generate` on one left-aligned batch (all prompts have one length,
so there is no padding). It runs with SDPA attention, the default KV cache,
`torch.inference_mode()`, and one forward pass with `logits_to_keep=1` for `prefill`. For aioserve
it is one `engine.stream` per prompt, all at once. Both use the same number of threads and the same
weights and dtype.

    python benchmarks/against_transformers.py --models 30m --dtypes float32
    python benchmarks/against_transformers.py --models 0.6b --cases single prefill --repeats 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

ENGINES = ("transformers", "aioserve")


@dataclass(frozen=True)
class Case:
    name: str
    prompts: int
    prompt_tokens: int
    output_tokens: int

    @property
    def counted_tokens(self) -> int:
        """Tokens of the reported rate: answer ids, or prompt ids if there is only one answer id."""
        if self.output_tokens == 1:
            return self.prompts * self.prompt_tokens
        return self.prompts * self.output_tokens

    def prompt_ids(self, vocab_size: int) -> list[list[int]]:
        source = random.Random(self.name)
        return [
            [source.randrange(vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.prompts)
        ]

    def small(self) -> Case:
        """Return the same shapes with a short answer, for the warm-up."""
        return Case(self.name, self.prompts, self.prompt_tokens, min(4, self.output_tokens))


def main() -> None:
    options = parse_arguments()
    if options.child is not None:
        run_child(options)
        return
    warn_about_load(options.threads)
    results = []
    for model in options.models:
        for dtype in options.dtypes:
            results += compare(model, dtype, options)
    print_table(results, options)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["30m", "0.6b"], metavar="30m|0.6b|DIR")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cases", nargs="+", default=["single", "concurrent", "prefill"])
    parser.add_argument("--output-tokens", type=int, default=128, help="of single and concurrent")
    parser.add_argument("--concurrency", type=int, default=32, help="prompts of concurrent")
    parser.add_argument("--prefill-tokens", type=int, default=2048, help="prompt of prefill")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--statistic", choices=("best", "median"), default="best")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--child-timeout", type=float, default=1800, help="seconds")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args()


def warn_about_load(threads: int) -> None:
    """Warn about other work on the machine: engines differ in how much it slows them."""
    busy = os.getloadavg()[0]
    if busy > 0.5 * threads:
        print(f"the machine is busy (load {busy:.1f}): ratios will be off", file=sys.stderr)


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def selected_cases(options: argparse.Namespace) -> list[Case]:
    every = {
        "single": Case("single", 1, 32, options.output_tokens),
        "concurrent": Case("concurrent", options.concurrency, 128, options.output_tokens),
        "prefill": Case("prefill", 1, options.prefill_tokens, 1),
    }
    unknown = set(options.cases) - set(every)
    if unknown:
        sys.exit(f"unknown cases {sorted(unknown)}; there are {list(every)}")
    return [every[name] for name in options.cases]


# The parent: children in turn, then ratios.


def compare(model: str, dtype: str, options: argparse.Namespace) -> list[dict]:
    path = str(model_directory(model))
    seconds: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for repeat in range(options.repeats):
        for engine in ENGINES:
            print(f"{model} {dtype}: {engine}, run {repeat + 1}", file=sys.stderr, flush=True)
            seconds[engine].append(start_child(engine, path, dtype, options))
    rows = []
    for case in selected_cases(options):
        rates = {}
        for engine in ENGINES:
            runs = [case.counted_tokens / run[case.name] for run in seconds[engine]]
            rates[engine] = max(runs) if options.statistic == "best" else statistics.median(runs)
        rows.append(
            {
                "model": model,
                "dtype": dtype,
                **asdict(case),
                "threads": options.threads,
                "tokens_per_second": rates,
                "ratio": rates["aioserve"] / rates["transformers"],
                "seconds": {e: [run[case.name] for run in seconds[e]] for e in ENGINES},
            }
        )
    return rows


def model_directory(model: str) -> Path:
    from aioserve.cli._models import random_model

    return random_model(model) if model in ("30m", "0.6b") else Path(model)


def start_child(
    engine: str, path: str, dtype: str, options: argparse.Namespace
) -> dict[str, float]:
    arguments = [
        *("--child", engine, "--models", path, "--dtypes", dtype, "--cases", *options.cases),
        *("--output-tokens", str(options.output_tokens)),
        *("--concurrency", str(options.concurrency)),
        *("--prefill-tokens", str(options.prefill_tokens), "--threads", str(options.threads)),
    ]
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        check=True,
        timeout=options.child_timeout,
        env=os.environ | {"AIOSERVE_NUM_THREADS": str(options.threads)},
    )
    return json.loads(done.stdout)


def print_table(results: list[dict], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"tokens/s, {options.statistic} of {options.repeats}", box=None)
    for column in ("model", "dtype", "case"):
        table.add_column(column)
    for column in (*ENGINES, "ratio"):
        table.add_column(column, justify="right")
    for row in results:
        rates = [f"{row['tokens_per_second'][engine]:,.1f}" for engine in ENGINES]
        case = f"{row['name']} {row['prompts']} x {row['prompt_tokens']} + {row['output_tokens']}"
        table.add_row(Path(row["model"]).name, row["dtype"], case, *rates, f"{row['ratio']:.2f}")
    Console().print(table)


# The children: one engine, all cases, seconds as JSON on stdout.


def run_child(options: argparse.Namespace) -> None:
    (path,), (dtype,) = options.models, options.dtypes
    cases = selected_cases(options)
    if options.child == "transformers":
        seconds = time_transformers(path, dtype, cases, options.threads)
    else:
        seconds = asyncio.run(time_aioserve(path, dtype, cases, options.threads))
    print(json.dumps(seconds))


def time_transformers(path: str, dtype: str, cases: list[Case], threads: int) -> dict[str, float]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    # No end-of-sequence id: every answer has its full length.
    model.generation_config.eos_token_id = None

    def run(case: Case) -> float:
        ids = torch.tensor(case.prompt_ids(model.config.vocab_size))
        started = time.perf_counter()
        with torch.inference_mode():
            if case.output_tokens == 1:
                model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
            else:
                answer = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=case.output_tokens,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=0,
                )
                expect(answer.shape[1] - ids.shape[1], case.output_tokens)
        return time.perf_counter() - started

    return {case.name: (run(case.small()), run(case))[1] for case in cases}


async def time_aioserve(path: str, dtype: str, cases: list[Case], threads: int) -> dict[str, float]:
    import torch

    from aioserve import Engine, SamplingParams

    torch.set_num_threads(threads)

    async def run(engine: Engine, case: Case) -> float:
        prompts = case.prompt_ids(engine.limits.vocab_size)
        params = SamplingParams(max_tokens=case.output_tokens, temperature=0.0, ignore_eos=True)

        async def read(prompt: list[int]) -> None:
            count = 0
            async for _ in engine.stream(prompt, params):
                count += 1
            expect(count, case.output_tokens)

        started = time.perf_counter()
        await asyncio.gather(*(read(prompt) for prompt in prompts))
        return time.perf_counter() - started

    async with Engine(path, dtype=cast(Any, dtype)) as engine:
        return {
            case.name: (await run(engine, case.small()), await run(engine, case))[1]
            for case in cases
        }


def expect(count: int, expected: int) -> None:
    if count != expected:
        raise RuntimeError(f"an answer has {count} tokens instead of {expected}")


if __name__ == "__main__":
    main()
