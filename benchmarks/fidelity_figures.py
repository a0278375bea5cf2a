"""Figures that `fidelity.py` compares of live and simulated runs, and their output."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from aioserve.simulation.cost import HostTimes

Times = dict[str, list[float]]
"""Seconds of each request that has them, by "ttft" and "tpot"."""

FIGURES = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"))
WIDTH_OF_FILES = 120
TIE = 0.02
"""Policies this close to each other are a tie even if live runs agree to the microsecond."""
FEW_DECIDED = 10
"""Least number of pairs with which the result says much about the simulator."""


def figures(
    live: dict[str, list[Times]],
    simulated: dict[str, list[Times]],
    at_live_speed: dict[str, list[Times]],
) -> list[dict[str, Any]]:
    """Return for each figure both sides, errors, and pairs of policies.

    Pairs are those that can be told apart, and those of them in another order.
    """
    found = []
    for name, percentile in FIGURES:
        rank = float(percentile[1:])
        rows = {}
        repeated = {}
        for policy, runs in live.items():
            values = [float(np.percentile(run[name], rank)) for run in runs]
            middle = float(np.median(values))
            repeated[policy] = values
            told = [float(np.percentile(run[name], rank)) for run in simulated[policy]]
            predicted = float(np.median(told))
            scaled = [np.percentile(run[name], rank) for run in at_live_speed[policy]]
            rows[policy] = {
                "live": middle,
                "noise": None if len(runs) < 2 else (max(values) - min(values)) / middle,
                "simulated": predicted,
                "scatter": (max(told) - min(told)) / predicted,
                "error": predicted / middle - 1,
                "error_at_live_speed": float(np.median(np.divide(scaled, values))) - 1,
            }
        decided, otherwise = ranked(rows, repeated)
        found.append(
            {
                "figure": f"{name} {percentile}",
                "policies": rows,
                "pairs": len(rows) * (len(rows) - 1) // 2,
                "decided": len(decided),
                "ranked_otherwise": otherwise,
            }
        )
    return found


def ranked(
    rows: dict[str, dict[str, Any]], repeated: dict[str, list[float]]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return pairs that live runs can tell apart, and those of them simulated in the other order.

    `repeated` are the live figures of each policy, run by run.
    """
    decided: list[tuple[str, str]] = []
    otherwise: list[tuple[str, str]] = []
    for one, other in itertools.combinations(rows, 2):
        ratios = np.divide(repeated[one], repeated[other])
        apart = abs(float(np.median(ratios)) - 1)
        if np.min(ratios) < 1 < np.max(ratios) or apart <= max(np.ptp(ratios), TIE):
            continue
        decided.append((one, other))
        is_less = rows[one]["simulated"] < rows[other]["simulated"]
        if is_less != bool(np.median(ratios) < 1):
            otherwise.append((one, other))
    return decided, otherwise


def print_result(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    # A file has room for all columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    options, machine, steps = result["options"], result["machine"], result["live_steps"]
    speeds = [speed for runs in result["speeds"].values() for blocks in runs for speed in blocks]
    source = options["synthetic"] if options["trace"] == "None" else Path(options["trace"]).name
    console.print(
        f"{source}: {result['requests']} requests in {result['seconds']:.1f} s "
        f"({result['left_out']} too long), {options['model']}, {machine['threads']} threads, "
        f"{options['repeats']} live runs of each policy, which take turns in {result['blocks']} "
        f"blocks",
        soft_wrap=True,
    )
    console.print(
        f"{result['measured_steps']:,} steps measured; of {steps['steps']:,} live steps the table "
        f"tells the sum with {steps['total']:+.1%}, each with {steps['median']:.1%} (median); "
        f"single blocks took {min(speeds):.2f} to {max(speeds):.2f} times what it says; "
        f"{HostTimes(**result['host'])}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    columns = (
        "",
        "policy",
        "live, ms",
        "noise",
        "simulated, ms",
        "scatter",
        "error",
        "at its speed",
    )
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("", "policy") else "right", no_wrap=True
        )
    errors: dict[str, list[float]] = {"error": [], "error_at_live_speed": []}
    for figure in result["figures"]:
        name, percentile = figure["figure"].split()
        for number, (policy, row) in enumerate(figure["policies"].items()):
            for kind, values in errors.items():
                values.append(abs(row[kind]))
            table.add_row(
                "" if number else f"{name.upper()} {percentile}",
                policy,
                f"{row['live'] * 1e3:,.2f}",
                "-" if row["noise"] is None else f"{row['noise']:.1%}",
                f"{row['simulated'] * 1e3:,.2f}",
                f"{row['scatter']:.1%}",
                f"{row['error']:+.1%}",
                f"{row['error_at_live_speed']:+.1%}",
            )
    console.print(table)
    plain, scaled = errors.values()
    console.print(
        f"errors: median {np.median(plain):.1%}, largest {max(plain):.1%}; at the speed of the "
        f"live run: median {np.median(scaled):.1%}, largest {max(scaled):.1%}",
        soft_wrap=True,
    )
    print_ranking(console, result)


def print_ranking(console: Any, result: dict[str, Any]) -> None:
    """Print how many pairs of policies can be told apart, and how many the simulator has right.

    Both are by figure and in all.
    """
    found = result["figures"]
    for figure in found:
        otherwise = figure["ranked_otherwise"]
        names = "; ".join(" and ".join(pair) for pair in otherwise)
        console.print(
            f"by {figure['figure']}: the noise decides {figure['decided']} of {figure['pairs']} "
            f"pairs of policies, {figure['decided'] - len(otherwise)} of them are simulated in the "
            f"same order{names and f', and not {names}'}",
            soft_wrap=True,
        )
    decided = sum(figure["decided"] for figure in found)
    wrong = sum(len(figure["ranked_otherwise"]) for figure in found)
    console.print(
        f"in all: {decided} of {sum(figure['pairs'] for figure in found)} pairs decided, "
        f"{decided - wrong} in the same order; {result['steps_outside']:.1%} of simulated steps, "
        f"at most, are none that were measured",
        soft_wrap=True,
    )
    if decided < FEW_DECIDED:
        console.print(
            f"this machine decides {'nothing' if not decided else 'next to nothing'}: its runs "
            f"differ more from each other than policies do; leave it alone, or give more --repeats",
            soft_wrap=True,
        )
