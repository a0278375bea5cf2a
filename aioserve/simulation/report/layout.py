"""Parts of a report, and the page that they make: a single file that fetches nothing and runs only
its own script.

Templates, style and script are in `parts/`. A page's policy allows only the style and the script
whose hashes it names, so other code in a page wouldn't run. Figures to download are CSV in links
that hold all of it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
from jinja2 import DictLoader, Environment

from aioserve.arguments import counted
from aioserve.simulation.metrics import Metrics
from aioserve.simulation.records import RequestRecord, SimulationResult
from aioserve.simulation.report.plot import look_of, symbols
from aioserve.simulation.request_rows import row_of, to_csv
from aioserve.simulation.served import ServedMetrics
from aioserve.simulation.timeline import Timeline

__all__ = [
    "COLUMNS",
    "MOST_BYTES",
    "Chart",
    "Download",
    "MeasuredRequests",
    "Panel",
    "PolicyRun",
    "RateRun",
    "ServedRun",
    "Table",
    "TokenGaps",
    "csv_link",
    "legend_of",
    "rendered",
    "requests_file",
]


TokenGaps = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]


class MeasuredRequests(Protocol):
    """Data of a run that charts of requests need, simulated or measured at a server."""

    kind: ClassVar[str]
    """Word for what `name` names, such as "policy"."""
    each: ClassVar[str]
    """Phrase for all runs, such as "under each policy"."""

    @property
    def name(self) -> str:
        """Name of the policy, or of what was measured."""
        ...

    @property
    def requests(self) -> Sequence[RequestRecord]:
        """All requests, in order of arrival."""
        ...

    @property
    def metrics(self) -> Metrics | ServedMetrics: ...

    @property
    def token_gaps(self) -> TokenGaps:
        """Seconds between tokens of one completion, in no order, and the count of each."""
        ...


class PolicyRun(msgspec.Struct, frozen=True):
    """One policy on the trace."""

    kind: ClassVar[str] = "policy"
    each: ClassVar[str] = "under each policy"
    name: str
    result: SimulationResult
    metrics: Metrics
    timeline: Timeline

    @property
    def requests(self) -> Sequence[RequestRecord]:
        return self.result.requests

    @property
    def token_gaps(self) -> TokenGaps:
        return self.timeline.token_gaps


class ServedRun(msgspec.Struct, frozen=True):
    """One load that a server was measured with."""

    kind: ClassVar[str] = "model"
    each: ClassVar[str] = "of the server"
    name: str
    requests: tuple[RequestRecord, ...]
    metrics: ServedMetrics
    token_gaps: TokenGaps


class RateRun(msgspec.Struct, frozen=True):
    """One policy at one rate of requests: all that is kept of a run if there are many."""

    name: str
    """Name of the policy."""
    rate: float
    """Requests that arrive per second."""
    metrics: Metrics


class Panel(msgspec.Struct, frozen=True):
    """One picture of a chart."""

    title: str
    svg: str


class Table(msgspec.Struct, frozen=True):
    """Figures that a chart shows. The first cell of a row says what the row is about."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Chart(msgspec.Struct, frozen=True):
    """Pictures that belong together, with their caption and table."""

    panels: tuple[Panel, ...]
    caption: str
    table: Table | None = None
    title: str = ""


PARTS = Path(__file__).with_name("parts")


def rendered(template: str, **values: Any) -> str:
    """Render a page from a template of `parts/`.

    All text of `values` is escaped. Text that UTF-8 can't encode, as in file names, is written as
    `?`.
    """
    style, script = _part("report.css"), _part("report.js")
    templates = {path.name: _part(path.name) for path in sorted(PARTS.glob("*.html"))}
    environment = Environment(loader=DictLoader(templates), autoescape=True)
    environment.filters["csv_link"] = csv_link
    page = environment.get_template(template).render(
        version=metadata.version("aioserve"),
        symbols=symbols(),
        style=style,
        script=script,
        style_hash=_hash_of(style),
        script_hash=_hash_of(script),
        **values,
    )
    return page.encode("utf-8", "replace").decode()


def legend_of(names: Sequence[str]) -> list[dict[str, str]]:
    """Return the legend for the templates: the look of each policy."""
    looks = [look_of(index) for index in range(len(names))]
    return [
        {"name": name, "css": look.css, "dashes": look.dashes, "mark": look.mark}
        for name, look in zip(names, looks, strict=True)
    ]


@cache
def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _hash_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


MOST_BYTES = 500_000
"""Most bytes of the link with all requests, compressed."""
COLUMNS = (
    "policy",
    "request",
    "tenant",
    "class",
    "session",
    "priority",
    "arrival_seconds",
    "prompt_tokens",
    "recorded_output_tokens",
    "output_tokens",
    "cached_tokens",
    "ending",
    "started_seconds",
    "first_token_seconds",
    "end_seconds",
    "ttft_seconds",
    "tpot_seconds",
    "e2e_seconds",
    "wait_tokens",
    "ttft_target_seconds",
    "tpot_target_seconds",
    "deadline_seconds",
    "met_targets",
)


class Download(msgspec.Struct, frozen=True):
    """A file in a link."""

    link: str
    rows: int
    left_out: int
    """Rows left out for lack of room."""
    each: str
    """Phrase for all runs, such as "under each policy"."""

    @property
    def rows_text(self) -> str:
        """Text about the rows in it and those left out."""
        text = f"{counted(self.rows, 'row', form=',')}, one for each request {self.each}"
        if not self.left_out:
            return f"{text}."
        return f"{text}, in order of arrival. Left out: the last {self.left_out:,}."


def csv_link(table: Table) -> str:
    """Return a link that holds the whole table."""
    text = to_csv((table.head, *table.rows))
    # A file's name need not be text, and a policy's name may be a file's.
    return "data:text/csv;charset=utf-8," + quote(text, safe=",.-:/ ", errors="replace")


def requests_file(runs: Sequence[MeasuredRequests]) -> Download:
    """Return a gzip file with a row for each request under each policy, in order of arrival.

    If `MOST_BYTES` is too little, the last requests are left out, the same ones of all policies.
    """
    head = [runs[0].kind if name == "policy" else name for name in COLUMNS]
    all_of_them = max(len(run.requests) for run in runs)
    kept = all_of_them
    while True:
        rows = [_row(run, r) for run in runs for r in run.requests[:kept]]
        packed = gzip.compress(to_csv((head, *rows)).encode(errors="replace"), mtime=0)
        link = "data:application/gzip;base64," + base64.b64encode(packed).decode()
        if len(link) <= MOST_BYTES or not kept:
            left_out = sum(max(0, len(run.requests) - kept) for run in runs)
            return Download(link, len(rows), left_out, runs[0].each)
        kept = min(kept - 1, int(kept * 0.95 * MOST_BYTES / len(link)))


# -- parts


def _row(run: MeasuredRequests, record: RequestRecord) -> list[object]:
    """Return the cells of a request; seconds to the microsecond."""
    values = row_of(record)
    values |= {
        "policy": run.name,
        "started_seconds": record.started_seconds,
        "first_token_seconds": record.first_token_seconds,
        "end_seconds": record.end_seconds,
        "met_targets": {None: None, True: "yes", False: "no"}[values["met_targets"]],
    }
    return [
        f"{value:.6f}" if name.endswith("_seconds") and value is not None else value
        for name, value in ((name, values[name]) for name in COLUMNS)
    ]
