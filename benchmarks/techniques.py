"""Measures the effect of each technique of a serving engine, switched on one after the other.

Three tables, all of one small model (`teaching.py`) behind `aioserve.Engine`. Answers are greedy,
and must be the same in each row of a table:

1. the classic teaching workload, from one request at a time without a KV cache to chunked prefill;
2. short requests behind one long prompt, with chunked prefill and without;
3. static against continuous batching, with answers of different lengths.

Steps, tokens, hit shares and bytes are counted and the same on every machine. Seconds are those of
the quickest of `--repeats` runs, since other work of the machine only makes a run slower.

    python benchmarks/techniques.py
    python benchmarks/techniques.py --repeats 1 --figures docs/explanation/figures
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from teaching import write_model
from technique_runs import (
    CONTIGUOUS_TOKENS,
    length_rows,
    length_table,
    run_all,
    technique_rows,
    technique_table,
    wait_rows,
    wait_table,
)

MIB = 1 << 20


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        model = write_model(Path(temporary) / "teaching")
        techniques = run_all(technique_rows(options), model, options.repeats)
        waits = run_all(wait_rows(options), model, options.repeats)
        lengths = run_all(length_rows(options), model, options.repeats)
    result = {
        "techniques": technique_table(techniques),
        "waits": wait_table(waits, options),
        "lengths": length_table(lengths, options),
    }
    print_techniques(result["techniques"], options)
    print_waits(result["waits"], options)
    print_lengths(result["lengths"], options)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.figures is not None:
        import technique_figures  # needs matplotlib

        directory = Path(options.figures)
        directory.mkdir(parents=True, exist_ok=True)
        technique_figures.draw_techniques(result["techniques"], directory)
        technique_figures.draw_waits(waits, options.decoding, directory)
        technique_figures.draw_lengths(lengths, options.lengths, directory)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, meaning in (
        ("repeats", 3, "runs of each row, of which the quickest counts"),
        ("output-tokens", 20, "of each answer, in the first two tables"),
        ("chunk-tokens", 256, "token budget of a step with chunked prefill"),
        ("requests", 32, "of the first table"),
        ("prefix-tokens", 100, "system prompt that they share"),
        ("seats", 8, "requests in a static batch"),
        ("decoding", 4, "requests being answered when the long prompt comes"),
        ("long-tokens", 2000, "length of the long prompt"),
        ("short", 8, "short requests behind it"),
        ("length-rounds", 4, "requests of each length in the third table"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    lengths = [10, 15, 20, 50, 100, 150, 200, 500]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, metavar="TOKENS")
    parser.add_argument("--json", metavar="FILE", help="write the tables there as well")
    parser.add_argument("--figures", metavar="DIR", help="draw SVG figures there (matplotlib)")
    options = parser.parse_args()
    if options.output_tokens < 2:
        parser.error(f"--output-tokens must be at least 2, got {options.output_tokens}")
    return options


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, box=None)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table, "")


def print_techniques(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print_table(
        f"{options.requests} requests, {options.prefix_tokens} tokens in common + 10 to 29, "
        f"{options.output_tokens} out; best of {options.repeats}",
        [
            "",
            "steps",
            "tokens",
            "per step",
            "seconds",
            "faster",
            "TTFT, ms",
            "hit share",
            "at once",
            "KV, MiB",
            f"at {CONTIGUOUS_TOKENS:,} each",
            "ratio",
        ],
        [
            [
                row["name"],
                f"{row['steps']:,}",
                f"{row['tokens_computed']:,}",
                f"{row['tokens_per_step']:.1f}",
                f"{row['seconds']:.3f}",
                f"{row['speedup']:.1f}",
                f"{1e3 * row['first_token_seconds_mean']:,.0f}",
                f"{row['hit_share']:.3f}",
                f"{row['peak_requests']}",
                f"{row['peak_kv_bytes'] / MIB:.1f}",
                f"{row['contiguous_kv_bytes'] / MIB:.0f}",
                f"{row['contiguous_ratio']:.1f}",
            ]
            for row in rows
        ],
    )


def print_waits(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.1f}"

    print_table(
        f"{options.decoding} requests run, then a prompt of {options.long_tokens:,} tokens and "
        f"{options.short} short ones come; milliseconds, best of {options.repeats}",
        [
            "",
            "steps",
            "largest step",
            "running: gap p50",
            "max",
            "short: TTFT p50",
            "max",
            "in tokens",
            "TPOT p50",
            "long: TTFT",
            "all done",
        ],
        [
            [
                row["name"],
                f"{row['steps']}",
                f"{row['largest_step_tokens']:,}",
                ms(row["running_gap_seconds"]["p50"]),
                ms(row["running_gap_seconds"]["max"]),
                ms(row["short_ttft_seconds"]["p50"]),
                ms(row["short_ttft_seconds"]["max"]),
                f"{row['short_ttft_tokens_p50']:,.0f}",
                ms(row["short_tpot_seconds_p50"]),
                ms(row["long_ttft_seconds"]),
                ms(row["seconds"]),
            ]
            for row in rows
        ],
    )


def print_lengths(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print_table(
        f"{len(options.lengths)} seats, {options.length_rounds} requests of each output length; "
        f"best of {options.repeats}",
        ["batching", "steps", "idle seats", "while any waits", "seconds"],
        [
            [
                row["name"],
                f"{row['steps']:,}",
                f"{row['idle_share']:.3f}",
                f"{row['idle_share_while_any_waits']:.3f}",
                f"{row['seconds']:.3f}",
            ]
            for row in rows
        ],
    )
    print_table(
        "mean step at which the answers of a length end",
        ["output tokens", *map(str, options.lengths)],
        [
            [row["name"], *(f"{row['mean_end_step'][str(n)]:,.0f}" for n in options.lengths)]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
