"""One page about runs of some policies on one trace: everything in it, nothing fetched."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from minijinja import Environment

from aioserve.errors import ConfigError
from aioserve.simulation.figures import client_rows, rows
from aioserve.simulation.metrics import Targets
from aioserve.simulation.report import charts
from aioserve.simulation.report.gantt import Window, busiest_window, gantt_chart
from aioserve.simulation.report.runs import PolicyRun
from aioserve.simulation.report.svg import chart_style, look_of

__all__ = ["check_can_draw", "report_page"]

TEMPLATE = "page.html"
GLYPHS = {"o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼"}


def check_can_draw() -> None:
    """Raise `ConfigError` where matplotlib, which draws the charts, isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "report: charts need matplotlib, which is not installed: pip install 'aioserve[report]'"
        )


def report_page(
    runs: Sequence[PolicyRun],
    *,
    title: str,
    command: str,
    facts: Sequence[tuple[str, str]],
    targets: Targets | None = None,
    window: Window | None = None,
) -> str:
    """The page's HTML. The same runs give the same text.

    command, facts: what was run, for the reader.
    window: seconds on the trace's clock whose steps are shown one by one; the busiest ones of the
        first policy unless given.
    """
    window = window or busiest_window(runs[0])
    found = {run.name: run.metrics for run in runs}
    with chart_style():
        parts = {
            "latency": charts.latency_chart(runs, targets),
            "targets": charts.targets_chart(runs),
            "clients": charts.clients_chart(runs),
            "queue": charts.queue_chart(runs),
            "batch": charts.batch_and_memory_chart(runs),
            "gantts": [gantt_chart(run, window, f"gantt{n}") for n, run in enumerate(runs)],
        }
    template = Path(__file__).with_name(TEMPLATE).read_text(encoding="utf-8")
    return Environment(templates={TEMPLATE: template}).render_template(
        TEMPLATE,
        title=title,
        version=metadata.version("aioserve"),
        command=command,
        facts=facts,
        legend=[
            {
                "name": run.name,
                "color": look_of(index).color,
                "dashes": " ".join(map(str, look_of(index).dashes)),
                "glyph": GLYPHS[look_of(index).marker],
            }
            for index, run in enumerate(runs)
        ],
        rows=rows(found),
        client_rows=client_rows(found),
        colors=charts.COLORS_OF_PARTS,
        window=f"{window[0]:,.2f} to {window[1]:,.2f} s",
        **parts,
    )
