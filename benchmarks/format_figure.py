"""Draws the results of `formats.py`: quality against bytes in memory. Depends on matplotlib.

python benchmarks/format_figure.py formats.json formats.svg --title "pyhelp"
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from technique_figures import BLUE, figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="what formats.py wrote with --json")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--title", required=True)
    options = parser.parse_args()
    draw(json.loads(options.results.read_text())["formats"], options.svg, options.title)


def draw(rows: list[dict[str, Any]], svg: Path, title: str) -> None:
    """Draw the divergence of each format but the first, on a logarithmic axis, with its
    interval.
    """
    with figure(svg, 8, 4, title) as drawn:
        axes = drawn.subplots()
        for row in rows:
            if row["comparison"] is None:
                continue
            megabytes = sum(row["weight_bytes"].values()) / 1e6
            divergence = row["comparison"]["kl_nats_per_token"]
            value = divergence["value"]
            low, high = divergence["low"] or value, divergence["high"] or value
            ends = [[value - low], [high - value]]
            axes.errorbar([megabytes], [value], yerr=ends, fmt="o", color=BLUE, capsize=3)
            place = {"xytext": (7, 3), "textcoords": "offset points"}
            axes.annotate(row["name"], (megabytes, value), fontsize=9, **place)
        axes.set_yscale("log")
        axes.margins(x=0.18)
        axes.set_xlabel("MB of weights in memory")
        axes.set_ylabel("KL from the first format, nats a token")


if __name__ == "__main__":
    main()
