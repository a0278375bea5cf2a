"""The page about a server: the charts of requests, in words that fit one."""

from __future__ import annotations

import re
from array import array

import pytest

from aioserve.simulation.records import Ending, RequestRecord
from aioserve.simulation.report import ServedRun, served_page
from aioserve.simulation.served import ServedRequest, served_metrics_of, token_gaps_of
from aioserve.traces.trace_request import TraceRequest
from tests.simulation.report.pages import attributes, downloads, drawings, read, shown_texts

TARGETS = {"ttft_target_seconds": 0.35, "tpot_target_seconds": 0.1}
NAUGHTY = "<b>&amp; it"


def page_of(count: int = 20, *, name: str = "model", failure: str = "status 429") -> str:
    load: list[ServedRequest] = []
    for number in range(count):
        record = RequestRecord(
            TraceRequest(number, number / 5, 10, 4, (), 10, tenant=f"c{number % 3}", **TARGETS)  # type: ignore[arg-type]
        )
        one = ServedRequest(record, True)
        if number % 7 == 6:
            record.ending, record.end_seconds = Ending.REFUSED, number / 5
            one.failure, one.detail = failure, NAUGHTY
        else:
            record.ending, record.output_tokens = Ending.FINISHED, 4
            record.first_token_seconds = number / 5 + 0.1 + number / 50
            record.end_seconds = record.first_token_seconds + 0.3
            one.chunks, one.gap_seconds = 4, array("d", [0.1, 0.1, 0.1])
        load.append(one)
    metrics = served_metrics_of(load, 5.0, busy_share=0.9)
    records = tuple(one.record for one in load)
    return served_page(
        ServedRun(name, records, metrics, token_gaps_of(load)),
        title="a title",
        command="aioserve bench serve http://h",
        facts=[("fact", "7")],
    )


@pytest.fixture(scope="module")
def whole() -> str:
    return page_of()


def test_everything_is_on_the_page(whole: str) -> None:
    for word in ("a title", "aioserve bench serve", "fact", "status 429", "goodput", "c2"):
        assert word in whole
    assert "Simulated" not in whole
    assert "it was busy for 90% of the time" in whole
    for section in read(whole).elements:
        if section[0] == "section":
            assert f'href="#{section[1]["id"]}"' in whole
    texts = [shown_texts(drawing) for drawing in drawings(whole)]
    assert sum({"50%", "90%", "99%", "99.9%"} <= set(found) for found in texts) == 4
    assert any("target 0.35 s" in found for found in texts)
    assert any({"c0", "c1", "c2"} <= set(found) for found in texts)


def test_it_speaks_of_a_server_and_of_no_policy(whole: str) -> None:
    shown = re.sub(r"<(style|script).*?</\1>", "", whole, flags=re.DOTALL)
    shown = re.sub(r'href="[^"]*"|http-equiv="[^"]*"', "", shown)
    assert not re.search("polic", shown, re.IGNORECASE)
    assert "of the server" in shown


def test_the_files_have_a_row_for_each_request(whole: str) -> None:
    files = downloads(whole)
    (requests,) = (rows for name, rows in files.items() if name.startswith("requests"))
    head, *rows = requests
    assert head[:3] == ["model", "request", "tenant"]
    assert [row[:2] for row in rows] == [["model", str(number)] for number in range(20)]


def test_text_is_text() -> None:
    page = page_of(name=NAUGHTY, failure=NAUGHTY)
    assert NAUGHTY not in page
    assert "&lt;b&gt;" in page or "&lt;b>" in page


def test_no_id_comes_twice(whole: str) -> None:
    ids = attributes(whole, "id")
    assert len(ids) == len(set(ids))


def test_a_load_without_a_request_is_a_page_too() -> None:
    page = page_of(0)
    assert "How long requests took" not in page
    assert "What was measured" in page
