"""Shows the figures of all policies side by side, how each differs from the first, and which is
best."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from aioserve.simulation.figures import Figure, client_rows, shown_figures
from aioserve.simulation.metrics import Metrics
from aioserve.simulation.report.runs import Table

__all__ = ["Cell", "Row", "clients_table", "figures_table", "summary_rows"]

MOST_CLIENTS = 200
NAME_CHARS = 48
LEAST_SHOWN_CHANGE = 0.0005
"""Least change shown: a smaller one rounds to no tenth of a percent."""


class Cell(msgspec.Struct, frozen=True):
    """One figure of one policy."""

    text: str
    change: str = ""
    """Change from the first policy, with its sign; empty where there is nothing to compare."""
    verdict: str = ""
    """`better` or `worse` than the first; empty where neither can be said."""
    best: bool = False


class Row(msgspec.Struct, frozen=True):
    label: str
    cells: tuple[Cell, ...]


def summary_rows(found: Mapping[str, Metrics]) -> list[Row]:
    """Rows of figures, with a cell for each policy."""
    return [_row(figure, list(found.values())) for figure in shown_figures(found)]


def figures_table(found: Mapping[str, Metrics]) -> Table:
    """Table of the figures to download."""
    head = ["figure"]
    for number, name in enumerate(found):
        head += [name, f"{name}, change", f"{name}, is"] if number else [name]
    rows: list[tuple[str, ...]] = []
    for row in summary_rows(found):
        cells = [row.label, row.cells[0].text]
        for cell in row.cells[1:]:
            cells += [cell.text, cell.change, cell.verdict]
        rows.append(tuple(cells))
    return Table("All figures under each policy", tuple(head), tuple(rows))


def clients_table(found: Mapping[str, Metrics]) -> Table | None:
    """Table of all clients, or of the `MOST_CLIENTS` with the most requests; None where the trace
    names none."""
    parts = client_rows(found)
    if not parts:
        return None
    requests = [client.requests for client in next(iter(found.values())).clients.values()]
    largest = sorted(range(len(requests)), key=lambda n: -requests[n])[:MOST_CLIENTS]
    head = ["client (requests)", *(f"{label}: {name}" for label, _ in parts for name in found)]
    rows = [
        (_short(parts[0][1][n][0]), *(text for _, lines in parts for text in lines[n][1]))
        for n in sorted(largest)
    ]
    caption = "Each client under each policy"
    if len(rows) < len(requests):
        caption += f"; left out: {len(requests) - len(rows):,} with fewer requests"
    return Table(caption, tuple(head), tuple(rows))


# -- parts


def _short(text: str) -> str:
    """Shorten a text, but not its end, which is the number of requests."""
    return text if len(text) <= NAME_CHARS else f"{text[: NAME_CHARS - 12]}…{text[-11:]}"


def _row(figure: Figure, all_metrics: list[Metrics]) -> Row:
    values = [figure.of(metrics) for metrics in all_metrics]
    texts = [figure.show(value) for value in values]
    best = _best_text(figure, values)
    cells = [
        Cell(text, *(_change(figure, values[0], value) if number else ("", "")), text == best)
        for number, (text, value) in enumerate(zip(texts, values, strict=True))
    ]
    return Row(figure.label, tuple(cells))


def _best_text(figure: Figure, values: list[float | None]) -> str | None:
    """Text of the best value; None where none is: neither more nor less is better, or all look
    alike."""
    known = [value for value in values if value is not None]
    if figure.better is None or len({figure.show(value) for value in known}) < 2:
        return None
    return figure.show(max(known) if figure.better == "more" else min(known))


def _change(figure: Figure, first: float | None, value: float | None) -> tuple[str, str]:
    if first is None or value is None:
        return "", ""
    if value == first:
        return "same", ""
    if math.isinf(value) or math.isinf(first):
        return "", _verdict(figure, math.isinf(value))
    relative = value - first if figure.is_share or not first else (value - first) / abs(first)
    if abs(relative) < LEAST_SHOWN_CHANGE:
        return "nearly the same", ""
    if figure.is_share:
        text = f"{relative * 100:+,.1f} points"
    elif first:
        text = f"{relative:+,.1%}"
    else:
        text = ("+" if relative > 0 else "") + figure.show(relative)
    return text.replace("-", "\N{MINUS SIGN}"), _verdict(figure, relative > 0)


def _verdict(figure: Figure, is_more: bool) -> str:
    if figure.better is None:
        return ""
    return "better" if is_more == (figure.better == "more") else "worse"
