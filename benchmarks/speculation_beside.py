"""Speculation of transformers beside ours: the same files, prompts and draft model, one stream.

    drafter   aioserve                            transformers
    lookup    suffix                              prompt lookup (`prompt_lookup_num_tokens`)
    model     the draft model                     assisted generation with it (`assistant_model`)

Both answer greedily, with the same dtype and number of threads, first without and then with each
drafter, in one process and in turn. Each ratio is to the same engine without speculation, of the
best of `--repeats` runs; the last column is what aioserve brings with speculation for each token
that transformers brings with its own.

    python benchmarks/speculation_beside.py
    python benchmarks/speculation_beside.py --model DIR --drafters lookup --workload edits
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from speculation_workloads import Sizes, asks_by_messages, sessions_of

from aioserve import Engine, SamplingParams, Speculation
from aioserve.assets import draft_path, model_path

OFF = "off"
OURS = {"lookup": "suffix", "model": "model"}
ENGINES = ("aioserve", "transformers")
Rates = dict[tuple[str, str], float]
"""Tokens per second by engine and drafter."""


def main() -> None:
    options = parse_arguments()
    os.environ["AIOSERVE_NUM_THREADS"] = str(options.threads)
    if options.draft is None and "model" in options.drafters:
        found = draft_path(options.model)
        if found is None:
            raise SystemExit(f"--draft is needed: no draft model comes with {options.model}")
        options.draft = str(found)
    prompts = asyncio.run(encoded_prompts(options))
    theirs = Transformers(options)
    rates: Rates = {}
    for _ in range(options.repeats):
        for drafter in (OFF, *options.drafters):
            runs = (asyncio.run(ours(drafter, prompts, options)), theirs.run(drafter, prompts))
            for engine, rate in zip(ENGINES, runs, strict=True):
                rates[engine, drafter] = max(rate, rates.get((engine, drafter), 0.0))
    print_rates(rates, options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pyhelp", metavar="pyhelp|DIR")
    parser.add_argument("--draft", metavar="DIR", help="the draft model; pyhelp's own for pyhelp")
    parser.add_argument("--drafters", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--workload", choices=("questions", "edits"), default="questions")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def engine_of(drafter: str, options: argparse.Namespace) -> Engine:
    name = OURS.get(drafter)
    speculation = None
    if name is not None:
        path = f":path={options.draft}" if name == "model" else ""
        most = options.max_draft_tokens
        speculation = Speculation(drafter=name + path, max_tokens=most)
    return Engine(options.model, dtype=options.dtype, speculation=speculation)


async def encoded_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the first prompt of each session."""
    sizes = Sizes(options.output_tokens, options.prompt_tokens, 1, Path())
    async with engine_of(OFF, options) as engine:
        by_messages = await asks_by_messages(engine)
        sessions = sessions_of(options.workload, options.prompts, by_messages, 0, sizes)
        return [list(await engine.encode(session.turns[0](()))) for session in sessions]


async def ours(
    drafter: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> float:
    """Tokens per second of one caller."""
    params = SamplingParams(max_tokens=options.output_tokens, temperature=0)
    async with engine_of(drafter, options) as engine:
        await engine.generate(prompts[0], SamplingParams(max_tokens=4, temperature=0))
        tokens, began = 0, time.perf_counter()
        for prompt in prompts:
            tokens += len((await engine.generate(prompt, params)).token_ids)
        return tokens / (time.perf_counter() - began)


class Transformers:
    """The model, and the draft model, as transformers has them."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        dtype = getattr(torch, options.dtype)

        def loaded(path: str | Path) -> Any:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

        self._options = options
        self._model = loaded(model_path(options.model) or options.model)
        self._more: dict[str, dict[str, Any]] = {
            OFF: {},
            "lookup": {"prompt_lookup_num_tokens": options.max_draft_tokens},
        }
        if "model" in options.drafters:
            self._more["model"] = {"assistant_model": loaded(options.draft)}

    def run(self, drafter: str, prompts: Sequence[Sequence[int]]) -> float:
        """Tokens per second of one caller."""
        import torch

        def tokens_of(prompt: Sequence[int], most: int) -> int:
            ids = torch.tensor([list(prompt)])
            more = self._more[drafter]
            found = self._model.generate(ids, max_new_tokens=most, do_sample=False, **more)
            return found.shape[1] - ids.shape[1]

        with torch.inference_mode():
            tokens_of(prompts[0], 4)
            tokens, began = 0, time.perf_counter()
            for prompt in prompts:
                tokens += tokens_of(prompt, self._options.output_tokens)
            return tokens / (time.perf_counter() - began)


def print_rates(rates: Rates, options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{Path(options.model).name}, {options.dtype}, {options.workload}: tokens/s (ratio)"
    table = Table(title=title, box=None)
    columns: list[tuple[str, Callable[[str], str]]] = [("drafter", str)]
    for engine in ENGINES:

        def cell(drafter: str, engine: str = engine) -> str:
            rate = rates[engine, drafter]
            return f"{rate:,.0f} ({rate / rates[engine, OFF]:.2f})"

        columns.append((engine, cell))
    ours, theirs = ENGINES
    columns.append(
        ("aioserve to transformers", lambda d: f"{rates[ours, d] / rates[theirs, d]:.2f}")
    )
    for name, _ in columns:
        table.add_column(name, justify="right")
    for drafter in (OFF, *options.drafters):
        table.add_row(*[cell(drafter) for _, cell in columns])
    Console().print(table)


if __name__ == "__main__":
    main()
