"""Compares one model in several formats: quality on a text, bytes in memory, and speed ratios.

    python benchmarks/formats.py bfloat16=pyhelp int8=pyhelp,quantization=int8 \\
        w4a16=pyhelp-w4a16 --text LICENSE
    python benchmarks/formats.py Q4_K_M=model-Q4_K_M.gguf,activation_quantization=none \\
        integers=model-Q4_K_M.gguf --text LICENSE --json formats.json

A format is a name, a model, and options of `Engine` for it. The first is the reference: others are
compared with its distributions over the whole vocabulary (`aioserve evaluate`), and with its speed.
Speeds are measured by turns, one format after the other in each round. The median of the ratios of
rounds counts: on a shared machine rates change from minute to minute, their ratios less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from aioserve import Engine, SamplingParams
from aioserve.cli.doctor import compute_facts

DECODED_TOKENS = 64
PROMPT_TOKENS = 512


class Variant(NamedTuple):
    name: str
    model: str
    options: dict[str, str]


def main() -> None:
    options = parse_arguments()
    rows = [quality(each, options) for each in options.formats]
    for row, speeds in zip(rows, asyncio.run(measure_speeds(options)), strict=True):
        row.update(speeds)
    facts = compute_facts()
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": facts, "formats": rows}, indent=2) + "\n")
    print(f"{facts['processor']}, {facts['isa']}, {facts['threads']} threads\n")
    print_table(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", metavar="NAME=MODEL[,OPTION=VALUE]", nargs="+", type=variant)
    parser.add_argument("--text", type=Path, required=True, help="a file in UTF-8")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file, too")
    return parser.parse_args()


def variant(text: str) -> Variant:
    name, _, rest = text.partition("=")
    model, *pairs = rest.split(",")
    options = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if not name or not model or len(options) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=MODEL[,OPTION=VALUE]")
    return Variant(name, model, options)


# -- quality


def quality(one: Variant, options: argparse.Namespace) -> dict[str, Any]:
    """Return perplexity, and the divergence from the first format, from a process of its own."""
    first: Variant = options.formats[0]
    command = [sys.executable, "-m", "aioserve", "evaluate", one.model, "--json", "-"]
    command += ["--text", str(options.text), "--max-tokens", str(options.max_tokens)]
    for name, value in one.options.items():
        command += [f"--{name.replace('_', '-')}", value]
    if one is not first:
        if first.options.keys() - {"dtype"}:
            sys.exit(f"formats: the first, {first.name}, may have no option but dtype")
        command += ["--reference", first.model]
        command += ["--reference-dtype", first.options.get("dtype", "auto")]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "name": one.name,
        "weight_bytes": result["models"][0]["weight_bytes"],
        "perplexity": result["models"][0]["perplexity"],
        "comparison": result.get("comparison"),
    }


# -- speed


async def measure_speeds(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return ratios of the speeds of a decode and of a prompt to those of the first format.

    They are medians of the rounds' ratios.
    """
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                Engine(one.model, num_pages=256, prefix_caching=False, **one.options)
            )
            for one in options.formats
        ]
        rounds: list[list[tuple[float, float]]] = []
        for number in range(options.rounds + 1):  # the first warms up
            rounds.append([await one_round(engine, number) for engine in engines])
    found: list[dict[str, float]] = []
    for place in range(len(engines)):
        decode, prompt = (
            statistics.median(each[0][kind] / each[place][kind] for each in rounds[1:])
            for kind in (0, 1)
        )
        found.append({"decode_ratio": decode, "prompt_ratio": prompt})
    return found


async def one_round(engine: Engine, number: int) -> tuple[float, float]:
    """Return the seconds of each further token, and of a prompt with its first token."""
    longest = engine.limits.max_model_len
    prompt = [(7 * place + number) % 1000 + 300 for place in range(PROMPT_TOKENS)]
    prompt = prompt[: longest - 2]
    few, many = (
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for count in (1, DECODED_TOKENS)
    )
    began = time.perf_counter()
    await engine.generate(prompt, few)
    prompt_seconds = time.perf_counter() - began
    began = time.perf_counter()
    await engine.generate(prompt[:8], few)
    middle = time.perf_counter()
    await engine.generate(prompt[:8], many)
    decode_seconds = (time.perf_counter() - middle - (middle - began)) / (DECODED_TOKENS - 1)
    return decode_seconds, prompt_seconds


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| format | MB | perplexity | KL, nats a token | same first token | decode | prompt |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        compared = row["comparison"]
        divergence = same = ""
        if compared is not None:
            divergence = with_interval(compared["kl_nats_per_token"], ".4f")
            same = f"{compared['same_top_token']['value']:.1%}"
        cells = (
            row["name"],
            f"{sum(row['weight_bytes'].values()) / 1e6:,.1f}",
            with_interval(row["perplexity"], ".3f"),
            divergence,
            same,
            f"{row['decode_ratio']:.2f}",
            f"{row['prompt_ratio']:.2f}",
        )
        print(f"| {' | '.join(cells)} |")


def with_interval(estimate: dict[str, float | None], form: str) -> str:
    low, high = estimate["low"], estimate["high"]
    around = "" if low is None or high is None else f" ± {(high - low) / 2:{form}}"
    return f"{estimate['value']:{form}}{around}"


if __name__ == "__main__":
    main()
