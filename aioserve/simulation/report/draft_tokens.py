"""Chart of what draft tokens brought: tokens of a step by its number of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.simulation.expected_tokens import counted_tokens, expected_tokens
from aioserve.simulation.report.layout import Chart, Panel, PolicyRun, Table
from aioserve.simulation.report.plot import Plot, look_of
from aioserve.simulation.report.scales import Linear, fitting

__all__ = ["draft_tokens_chart"]

CAPTION = (
    "Marks are what the draft tokens of each run came to: one token, and for each place the share "
    "of its draft tokens that were right. A line is what is expected of a drafter that is right in "
    "the same share of its first draft tokens, and as often in each further one: "
    "(1 - a^(k+1)) / (1 - a). Where one that is right makes it likelier that the next is, marks "
    "are above their line."
)


def draft_tokens_chart(runs: Sequence[PolicyRun]) -> Chart | None:
    """Return a chart of tokens per step; None if no step verified a draft token."""
    found = {
        (index, run.name): run.metrics.speculation
        for index, run in enumerate(runs)
        if run.metrics.speculation is not None and run.metrics.speculation.drafted_tokens
    }
    if not found:
        return None
    lines: list[tuple[int, list[float], list[float]]] = []
    rows: list[tuple[str, ...]] = []
    for (index, name), speculation in found.items():
        counted = counted_tokens(speculation.drafted, speculation.accepted)
        first = speculation.accepted[0] / speculation.drafted[0] if speculation.accepted else 0.0
        expected = [expected_tokens(first, k) for k in range(1, len(counted) + 1)]
        lines.append((index, expected, counted))
        for k, (one, other) in enumerate(zip(expected, counted, strict=True), 1):
            verified = f"{speculation.drafted[k - 1]:,}"
            rows.append((name, f"{k}", f"{one:.2f}", f"{other:.2f}", verified))
    most = max([len(counted) for _, _, counted in lines])
    values = [value for _, *both in lines for one in both for value in one]
    plot = Plot(Linear(0.0, most + 0.5), fitting([1.0, *values]), height=200)
    for index, expected, counted in lines:
        plot.line([(0.0, 1.0), *enumerate(expected, 1)], look_of(index))
        for k, value in enumerate(counted, 1):
            tip = f"{runs[index].name}\n{k} draft tokens: {value:.2f} tokens"
            plot.mark((k, value), look_of(index), tip)
    told = [f"{name} {tokens} tokens with {k}" for name, k, _, tokens, _ in rows]
    svg = plot.svg(
        "draft-tokens",
        f"Tokens of a step by its draft tokens, {runs[0].each}",
        "; ".join(told),
        x_label="draft tokens that a step verifies",
    )
    head = (runs[0].kind, "draft tokens", "expected", "counted", "steps with so many")
    table = Table(f"Tokens of a step {runs[0].each}", head, tuple(rows))
    return Chart((Panel("Tokens per step of a sequence", svg),), CAPTION, table)
