"""Downloads of figures: CSV in links that hold all of it, so that nothing is fetched."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from aioserve.arguments import counted
from aioserve.simulation.metrics import Targets, e2e_seconds, tpot_seconds, ttft_seconds
from aioserve.simulation.records import RequestRecord
from aioserve.simulation.report.runs import PolicyRun, Table
from aioserve.simulation.request_rows import to_csv

__all__ = ["COLUMNS", "MOST_BYTES", "Download", "csv_link", "requests_file"]

MOST_BYTES = 500_000
"""Most bytes of the link of all requests, packed."""
COLUMNS = (
    "policy",
    "request",
    "client",
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
    "met_targets",
)


class Download(msgspec.Struct, frozen=True):
    """A file in a link."""

    link: str
    rows: int
    left_out: int
    """Rows left out for lack of room."""

    @property
    def rows_text(self) -> str:
        """Text about the rows in it and those left out."""
        text = f"{counted(self.rows, 'row', form=',')}, one for each request under each policy"
        if not self.left_out:
            return f"{text}."
        return f"{text}, in order of arrival. Left out: the last {self.left_out:,}."


def csv_link(table: Table) -> str:
    """A link that holds the whole table."""
    text = to_csv((table.head, *table.rows))
    # A file's name need not be text, and a policy may be named by one.
    return "data:text/csv;charset=utf-8," + quote(text, safe=",.-:/ ", errors="replace")


def requests_file(runs: Sequence[PolicyRun], targets: Targets | None) -> Download:
    """File with a row for each request under each policy, in order of arrival; what has no room in
    `MOST_BYTES` is left out, the last requests of all policies alike. Packed with gzip."""
    all_of_them = max(len(run.result.requests) for run in runs)
    kept = all_of_them
    while True:
        rows = [_row(run, r, targets) for run in runs for r in run.result.requests[:kept]]
        packed = gzip.compress(to_csv((COLUMNS, *rows)).encode(errors="replace"), mtime=0)
        link = "data:application/gzip;base64," + base64.b64encode(packed).decode()
        if len(link) <= MOST_BYTES or not kept:
            left_out = sum(max(0, len(run.result.requests) - kept) for run in runs)
            return Download(link, len(rows), left_out)
        kept = min(kept - 1, int(kept * 0.95 * MOST_BYTES / len(link)))


# -- parts


def _row(run: PolicyRun, record: RequestRecord, targets: Targets | None) -> tuple[object, ...]:
    request = record.request
    return (
        run.name,
        request.number,
        request.client,
        request.session,
        request.priority,
        _seconds(request.arrival_seconds),
        request.prompt_tokens,
        request.output_tokens,
        record.output_tokens,
        record.cached_tokens,
        "" if record.ending is None else record.ending.value,
        _seconds(record.started_seconds),
        _seconds(record.first_token_seconds),
        _seconds(record.end_seconds),
        _seconds(ttft_seconds(record)),
        _seconds(tpot_seconds(record)),
        _seconds(e2e_seconds(record)),
        "" if record.wait_tokens is None else record.wait_tokens,
        "" if targets is None else ("yes" if targets.met(record) else "no"),
    )


def _seconds(value: float | None) -> str:
    """Text of seconds, to the microsecond."""
    return "" if value is None else f"{value:.6f}"
