"""Draws the counts of `techniques.py`, as SVG.

Nothing here depends on durations, so the same settings give the same figures on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from teaching import Step
from technique_runs import CONTIGUOUS_TOKENS, Run, steps_from

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
GREY, PALE = "#555555", "#D9D9D9"
MIB = 1 << 20
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "aioserve",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "legend.frameon": False,
}


@contextmanager
def figure(path: Path, width: float, height: float, title: str) -> Iterator[Figure]:
    """Yield a figure that is saved to `path` at the end. Text stays text, the background is
    white.
    """
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        drawn.suptitle(title, fontsize=12, fontweight="bold", x=0.01, horizontalalignment="left")
        yield drawn
        drawn.savefig(path, metadata={"Date": None})


def draw_techniques(rows: list[dict[str, Any]], directory: Path) -> None:
    """Draw techniques.svg, steps and tokens of each row, and kv-bytes.svg, its KV, and without
    pages.
    """
    names = [row["name"] for row in rows]
    title = "The same answers in fewer steps, and with fewer tokens computed"
    with figure(directory / "techniques.svg", 9, 3.2, title) as drawn:
        for axes, key, label, colour in zip(
            drawn.subplots(1, 2, sharey=True),
            ("steps", "tokens_computed"),
            ("steps (logarithmic)", "tokens computed (logarithmic)"),
            (BLUE, ORANGE),
            strict=True,
        ):
            _dots(axes, [row[key] for row in rows], colour)
            axes.set_xlabel(label)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.4, -0.6)
    title = "KV memory at the peak"
    with figure(directory / "kv-bytes.svg", 9, 4, title) as drawn:
        axes = drawn.subplots()
        for offset, key, colour, label in (
            (-0.2, "contiguous_kv_bytes", PALE, f"if {CONTIGUOUS_TOKENS:,} tokens were set aside"),
            (0.2, "peak_kv_bytes", GREEN, "pages that requests hold"),
        ):
            values = [row[key] / MIB for row in rows]
            places = [place + offset for place in range(len(rows))]
            bars = axes.barh(places, values, 0.36, color=colour, label=label)
            labels = [f"{value:.1f}" if value < 20 else f"{value:.0f}" for value in values]
            axes.bar_label(bars, labels, padding=3)
        at_once = [f"{row['name']}\n({row['peak_requests']} at once)" for row in rows]
        axes.set_yticks(range(len(rows)), at_once)
        axes.invert_yaxis()
        axes.set_xlabel("MiB")
        axes.legend(loc="upper right")


def draw_waits(runs: dict[str, Run], num_running: int, directory: Path) -> None:
    """Draw long-prompt.svg, the work of each step from the long prompt's arrival on.

    A step is as wide as the tokens that it computes.
    """
    title = "A long prompt comes, and short ones right behind it"
    with figure(directory / "long-prompt.svg", 9, 5.6, title) as drawn:
        rows = drawn.subplots(len(runs), 1, sharex=True)
        for axes, (name, one) in zip(rows, runs.items(), strict=True):
            _draw_steps(axes, steps_from(one.steps, num_running), num_running)
            axes.set_title(name)
            axes.set_yticks([2, 1, 0], ["running requests", "long prompt", "short requests"])
            axes.set_ylim(-0.6, 2.6)
        rows[-1].set_xlabel("tokens computed since they came")
        marks = [
            rows[0].scatter([], [], marker="|", s=90, color=BLUE, label="their next tokens"),
            Patch(color=ORANGE, label="long prompt computed"),
            Patch(color=GREEN, label="short prompts computed"),
            rows[0].scatter([], [], marker="o", s=26, color="black", label="first tokens"),
        ]
        drawn.legend(handles=marks, loc="outside lower center", ncols=len(marks))


def draw_lengths(runs: dict[str, Run], lengths: list[int], directory: Path) -> None:
    """Draw static-continuous.svg: which request has which seat of the batch in which step."""
    title = "Seats of the batch, by output length of the request that has them"
    with figure(directory / "static-continuous.svg", 9, 4.6, title) as drawn:
        rows = drawn.subplots(len(runs), 1, sharex=True)
        shades = mpl.colormaps["viridis"].resampled(len(lengths))
        for axes, (name, one) in zip(rows, runs.items(), strict=True):
            axes.barh(range(len(lengths)), len(one.steps), 0.86, color=PALE)
            for request, (seat, first, end) in _seats(one.steps, len(lengths)).items():
                bar = [(first, end - first)]
                axes.broken_barh(
                    bar,
                    (seat - 0.43, 0.86),
                    facecolor=shades(request % len(lengths)),
                    edgecolor="white",
                    linewidth=0.4,
                )
            axes.set_title(f"{name}: {len(one.steps):,} steps")
            axes.set_ylabel("seat", labelpad=8)
            axes.set_yticks(range(len(lengths)), [str(1 + n) for n in range(len(lengths))])
            axes.set_ylim(len(lengths) - 0.4, -0.6)
        rows[-1].set_xlabel("step")
        marks = [
            Patch(color=shades(place), label=f"{length}") for place, length in enumerate(lengths)
        ]
        marks.append(Patch(color=PALE, label="idle"))
        drawn.legend(
            handles=marks, loc="outside lower center", ncols=len(marks), title="output tokens"
        )


def _dots(axes: Axes, values: list[int], colour: str) -> None:
    axes.plot(values, range(len(values)), color=PALE, zorder=1)
    axes.scatter(values, range(len(values)), s=60, color=colour, zorder=2)
    for place, value in enumerate(values):
        axes.annotate(f"{value:,}", (value, place), (9, 0), textcoords="offset points", va="center")
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 1.6, max(values) * 4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")


def _draw_steps(axes: Axes, steps: list[Step], num_running: int) -> None:
    long = num_running
    begun: set[int] = set()
    widths: dict[int, list[tuple[int, int]]] = {1: [], 0: []}
    ticks, first_tokens = [], []
    done = last = 0
    for step in steps:
        place = done + sum(step.tokens.get(request, 0) for request in range(num_running))
        for lane, requests in ((1, [long]), (0, [r for r in step.tokens if r > long])):
            tokens = sum(step.tokens.get(r, 0) for r in requests if r not in begun)
            if tokens:
                widths[lane].append((place, tokens))
            place += tokens
        done += sum(step.tokens.values())
        if min(step.sampled, default=long) < num_running:
            ticks.append(done)
        for lane, requests in ((1, {long}), (0, set(step.sampled) - set(range(long + 1)))):
            new = (requests & step.sampled) - begun
            first_tokens += [(done, lane)] * bool(new)
            begun |= new
            last = done if new else last
    axes.broken_barh(widths[1], (0.7, 0.6), facecolor=ORANGE)
    axes.broken_barh(widths[0], (-0.3, 0.6), facecolor=GREEN)
    axes.scatter(ticks, [2] * len(ticks), marker="|", s=90, color=BLUE)
    axes.scatter(*zip(*first_tokens, strict=True), marker="o", s=26, color="black", zorder=3)
    axes.set_xlim(-30, 1.04 * last)


def _seats(steps: list[Step], num_seats: int) -> dict[int, tuple[int, int, int]]:
    """Return for each request its seat, the step before its first, and its last step."""
    free = list(range(num_seats))
    taken: dict[int, tuple[int, int, int]] = {}
    before: set[int] = set()
    for number, step in enumerate(steps):
        now = set(step.tokens)
        free = sorted([*free, *(taken[request][0] for request in before - now)])
        for request in sorted(now - before):
            taken[request] = (free.pop(0), number, number)
        for request in now:
            taken[request] = (*taken[request][:2], number + 1)
        before = now
    return taken
