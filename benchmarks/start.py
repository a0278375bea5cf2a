"""Times the start of a model, from the start of a process to its first token, by part.

Each repetition is a process of its own, over files that lie in the page cache; the best counts.
Each process enters an engine twice. The second time torch is imported already, as in a program that
uses it. Weights, tokenizer and imports are read at the same time, so `engine` is less than their
sum.

    aioserve      the interpreter, and `import aioserve`
    engine        `async with Engine(...)`, of which
      imports       torch, and what needs it
      weights       reading, converting and packing them
      tokenizer     reading it
      decoder       making the model of them
    first token   of a prompt of three
    all           of these in a row

    python benchmarks/start.py MODEL
    python benchmarks/start.py MODEL --dtype bfloat16 --repeats 5 --json start.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = ("imports", "weights", "tokenizer", "decoder")
ROWS = ("aioserve", "engine", *PARTS, "first token", "all")
PIECE_BYTES = 1 << 24


def main() -> None:
    options = parse_arguments()
    if options.began is not None:
        print(json.dumps(start(options)))
        return
    warm(Path(options.model))
    runs = [run_once(options) for _ in range(options.repeats)]
    best = {
        when: min((run[when] for run in runs), key=lambda seconds: seconds["all"])
        for when in ("first", "again")
    }
    print_table(options, best)
    if options.json is not None:
        Path(options.json).write_text(json.dumps({"best": best, "runs": runs}, indent=2) + "\n")


def warm(model: Path) -> None:
    """Read the weights, so that they are in the page cache."""
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(PIECE_BYTES):
                pass


def run_once(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the seconds of one process."""
    command = [sys.executable, __file__, options.model, "--dtype", options.dtype]
    done = subprocess.run(
        [*command, "--began", repr(time.monotonic())], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def start(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure this process, begun at `options.began` on the clock of all processes."""
    import aioserve

    imported = time.monotonic() - options.began
    return asyncio.run(enter_twice(aioserve, options.model, options.dtype, imported))


async def enter_twice(
    aioserve: Any, model: str, dtype: str, imported: float
) -> dict[str, dict[str, float]]:
    first = await enter(aioserve, model, dtype)
    again = await enter(aioserve, model, dtype)
    return {
        "first": {"aioserve": imported, **first, "all": imported + total(first)},
        "again": {"aioserve": 0.0, **again, "all": total(again)},
    }


async def enter(aioserve: Any, model: str, dtype: str) -> dict[str, float]:
    began = time.perf_counter()
    async with aioserve.Engine(model, dtype=dtype) as engine:
        entered = time.perf_counter()
        await engine.generate([1, 2, 3], aioserve.SamplingParams(max_tokens=1, temperature=0.0))
        answered = time.perf_counter()
        parts = engine.dump()["model"]["loading_seconds"]
    return {"engine": entered - began, **parts, "first token": answered - entered}


def total(seconds: dict[str, float]) -> float:
    return seconds["engine"] + seconds["first token"]


def print_table(options: argparse.Namespace, best: dict[str, dict[str, float]]) -> None:
    from aioserve import _native

    cpu = _native.cpu_info()
    stored = sum(file.stat().st_size for file in Path(options.model).glob("*.safetensors"))
    print(
        f"{Path(options.model).name}, {stored / 1e6:,.0f} MB as {options.dtype}, "
        f"{cpu['threads']} threads, {cpu['isa']}, best of {options.repeats}"
    )
    print(f"{'seconds':<14} {'first':>7} {'again':>7}")
    for row in ROWS:
        name = f"  {row}" if row in PARTS else row
        print(f"{name:<14} {best['first'][row]:7.2f} {best['again'][row]:7.2f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the directory of a model")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--repeats", type=int, default=3, help="processes")
    parser.add_argument("--json", metavar="FILE", help="write all seconds there")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
