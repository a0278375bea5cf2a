"""Measures the cost of structured output: throughput with answers that have a form, against
without.

Answers are greedy, of `--output-tokens` each, all submitted at once. In one run and in turn:

    plain        `--requests` answers of no form
    plain + 1    the same, and one more: the tokens of the others count, here and in the next two
    neighbour    the same, where the one more follows a JSON schema
    its steps    the same without `jump_forward`
    constrained  `--requests` answers, each with the schema
    one by one   the same without `jump_forward`
    logprobs     constrained, with log-probabilities: what is forced is drawn all the same
    singly       the same without `jump_forward`

The schema is a list of records that never ends. Rows with a neighbour are compared with plain + 1,
the others with plain, in two ways. One is the best of `--repeats` runs, since other work of the
machine only ever makes a run slower. The other is the median over the repeats of two runs in a row.
The share of a neighbour is the part of its tokens that it has when the others have all of theirs.

    python benchmarks/structured.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from operator import truediv
from pathlib import Path
from typing import Any

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["function", "class", "module"]},
            "lines": {"type": "integer", "minimum": 0, "maximum": 99999},
            "is_public": {"type": "boolean"},
        },
        "required": ["name", "kind", "lines", "is_public"],
        "additionalProperties": False,
    },
}
AGAINST = {
    "plain": "plain",
    "plain + 1": "plain",
    "neighbour": "plain + 1",
    "its steps": "plain + 1",
    "constrained": "plain",
    "one by one": "plain",
    "logprobs": "plain",
    "singly": "plain",
}
"""Side that each side is compared with."""
STEP_BY_STEP = ("its steps", "one by one", "singly")
WITH_LOGPROBS = ("logprobs", "singly")
ONE_MORE = ("plain + 1", "neighbour", "its steps")


def main() -> None:
    options = parse_arguments()
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    rows = [asyncio.run(compare(model, options)) for model in options.models]
    print_table(rows, options)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["pyhelp", "random:30m"])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


async def compare(model: str, options: argparse.Namespace) -> dict[str, Any]:
    from aioserve import Engine
    from aioserve.cli._models import model_or_random

    path = model_or_random(model)
    rates: dict[str, list[float]] = {side: [] for side in AGAINST}
    steps: dict[str, int] = {}
    shares: dict[str, list[float]] = {side: [] for side in ONE_MORE}
    async with (
        Engine(path, dtype=options.dtype, num_pages=4096) as engine,
        Engine(path, dtype=options.dtype, num_pages=4096, jump_forward=False) as one_by_one,
    ):
        for repeat in range(-1, options.repeats):
            for side in AGAINST:
                on = one_by_one if side in STEP_BY_STEP else engine
                before = on.stats().steps_total
                rate, share = await run(on, side, options)
                steps[side] = on.stats().steps_total - before
                if repeat >= 0:
                    print(f"{model}: {side}, {rate:.0f} tokens/s", file=sys.stderr, flush=True)
                    rates[side].append(rate)
                    if side in shares:
                        shares[side].append(share)
    best = {side: max(rates[side]) for side in AGAINST}
    return {
        "model": model,
        "tokens_per_second": best,
        "ratio": {side: best[side] / best[other] for side, other in AGAINST.items()},
        "median_ratio": {
            side: statistics.median(map(truediv, rates[side], rates[other]))
            for side, other in AGAINST.items()
        },
        "all_tokens_per_second": rates,
        "steps": steps,
        "share": {side: statistics.median(shares[side]) for side in ONE_MORE},
    }


async def run(engine: Any, side: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return tokens per second of the `--requests` answers, and the share of the one more, if
    any.
    """
    import msgspec

    from aioserve import SamplingParams, StructuredOutput

    plain = SamplingParams(max_tokens=options.output_tokens, temperature=0, ignore_eos=True)
    form = StructuredOutput(json_schema=SCHEMA, disable_any_whitespace=True)
    constrained = SamplingParams(
        max_tokens=options.output_tokens, temperature=0, structured_output=form
    )
    has_form = side in ("constrained", "one by one", *WITH_LOGPROBS)
    if side in WITH_LOGPROBS:
        constrained = msgspec.structs.replace(constrained, logprobs=0)
    params = [constrained if has_form else plain] * options.requests
    prompts = [
        [(7 * i + 13 * place) % 200 + 10 for i in range(options.prompt_tokens)]
        for place in range(options.requests + 1)
    ]
    began = time.perf_counter()
    neighbour = reading = None
    if side in ONE_MORE:
        one_more = plain if side == "plain + 1" else constrained
        neighbour = engine.stream(prompts[-1], one_more)
        reading = asyncio.ensure_future(read(neighbour))
    answers = await asyncio.gather(*map(engine.generate, prompts, params))
    seconds = time.perf_counter() - began
    share = 0.0
    if neighbour is not None and reading is not None:
        share = neighbour.usage.completion_tokens / options.output_tokens
        await reading
    tokens = sum(len(answer.token_ids) for answer in answers)
    if tokens != options.requests * options.output_tokens:
        raise RuntimeError(f"{tokens} tokens came: the model's context is too short")
    return tokens / seconds, share


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


def print_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{options.requests} requests, {options.prompt_tokens} tokens in, "
        f"{options.output_tokens} out; tokens/s: best of {options.repeats}, "
        "and to another side: of the best, and the median of pairs"
    )
    table = Table("model", "side", title=title, box=None)
    for column in ("tokens/s", "ratio", "median", "steps", "share"):
        table.add_column(column, justify="right")
    table.add_column("to")
    for row in rows:
        for side, other in AGAINST.items():
            table.add_row(
                Path(row["model"]).name,
                side,
                f"{row['tokens_per_second'][side]:,.0f}",
                f"{row['ratio'][side]:.3f}",
                f"{row['median_ratio'][side]:.3f}",
                str(row["steps"][side]),
                f"{row['share'][side]:.2f}" if side in row["share"] else "",
                other if side != other else "",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
