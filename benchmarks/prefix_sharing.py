"""Times requests that begin alike, with the prefix cache and without.

All requests are submitted at once to an engine that has seen none of them. In one run and in turn,
this is done with the cache on and with the cache off. Seconds run from the first submission to the
last id. The best of `--repeats` counts, since other work of the machine only ever makes a run
slower. Prompts are random ids: a prefix that is common to all, and a tail of each one's own. The
answers are greedy, past end-of-sequence ids, and must be the same in both.

The model `pyhelp-size` has random weights, the embedded model's shape, and a longer context. The
models `random:30m` and `random:0.6b` are those of `aioserve bench`.

    python benchmarks/prefix_sharing.py
    python benchmarks/prefix_sharing.py --models random:30m --dtype bfloat16 --output-tokens 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PYHELP_SIZE = "pyhelp-size"
SIDES = ("on", "off")


def main() -> None:
    options = parse_arguments()
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        rows = [
            asyncio.run(compare(model, model_directory(model, Path(temporary)), options))
            for model in options.models
        ]
    print_table(rows, options)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = [PYHELP_SIZE, "random:30m"]
    parser.add_argument("--models", nargs="+", default=models, metavar=f"{PYHELP_SIZE}|random:|DIR")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--tail-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def model_directory(model: str, temporary: Path) -> str:
    from aioserve.assets import model_path
    from aioserve.cli._models import model_or_random
    from aioserve.testing.random_model import write_random_model

    embedded = model_path("pyhelp")
    if model != PYHELP_SIZE or embedded is None:
        return model_or_random(model)
    config = json.loads((embedded / "config.json").read_text(encoding="utf-8"))
    return str(write_random_model(temporary / model, config | {"max_position_embeddings": 8192}))


async def compare(model: str, path: str, options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for repeat in range(options.repeats):
        for side in SIDES:
            print(f"{model}: cache {side}, run {repeat + 1}", file=sys.stderr, flush=True)
            runs[side].append(await run(path, side == "on", options))
    if len({json.dumps(one["answers"]) for side in SIDES for one in runs[side]}) > 1:
        raise RuntimeError(f"{model}: the answers are not the same with and without the cache")
    seconds = {side: min(one["seconds"] for one in runs[side]) for side in SIDES}
    return {
        "model": model,
        "dtype": options.dtype,
        "seconds": seconds,
        "ratio": seconds["off"] / seconds["on"],
        "tokens_prefilled": {side: runs[side][0]["tokens_prefilled"] for side in SIDES},
        "all_seconds": {side: [one["seconds"] for one in runs[side]] for side in SIDES},
    }


async def run(path: str, prefix_caching: bool, options: argparse.Namespace) -> dict[str, Any]:
    from aioserve import Engine, SamplingParams

    params = SamplingParams(max_tokens=options.output_tokens, temperature=0.0, ignore_eos=True)
    async with Engine(
        path, dtype=options.dtype, page_size=options.page_size, prefix_caching=prefix_caching
    ) as engine:
        source = random.Random(0)

        def ids(count: int) -> list[int]:
            return [source.randrange(engine.limits.vocab_size) for _ in range(count)]

        await engine.generate(ids(64), params)  # warm-up
        before = engine.stats().tokens_prefilled_total
        prefix = ids(options.prefix_tokens)
        prompts = [prefix + ids(options.tail_tokens) for _ in range(options.requests)]
        started = time.perf_counter()
        answers = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        seconds = time.perf_counter() - started
        for answer in answers:
            if len(answer.token_ids) != options.output_tokens:
                raise RuntimeError(
                    f"an answer has {len(answer.token_ids)} tokens instead of "
                    f"{options.output_tokens}: the model's context is too short"
                )
        return {
            "seconds": seconds,
            "tokens_prefilled": engine.stats().tokens_prefilled_total - before,
            "answers": [answer.token_ids for answer in answers],
        }


def print_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{options.requests} requests, {options.prefix_tokens} tokens in common + "
        f"{options.tail_tokens}, {options.output_tokens} out; best of {options.repeats}"
    )
    table = Table(title=title, box=None)
    for column in ("model", "dtype"):
        table.add_column(column)
    for column in ("computed, on", "off", "seconds, on", "off", "off / on"):
        table.add_column(column, justify="right")
    for row in rows:
        computed, seconds = row["tokens_prefilled"], row["seconds"]
        table.add_row(
            Path(row["model"]).name,
            row["dtype"],
            *(f"{computed[side]:,}" for side in SIDES),
            *(f"{seconds[side]:.2f}" for side in SIDES),
            f"{row['ratio']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
