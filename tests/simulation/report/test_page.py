"""The page: whole, on its own, bounded, and with all text as text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from aioserve.simulation.metrics import met_targets, metrics_of
from aioserve.simulation.records import Ending, RequestRecord
from aioserve.simulation.report import PolicyRun, layout, report_page
from aioserve.simulation.report.windows import choose_windows
from aioserve.simulation.timeline import Span, StepSample, Timeline
from aioserve.traces.trace_request import TraceRequest
from tests.simulation.report.pages import attributes, downloads, drawings, read, shown_texts
from tests.simulation.report.runs import asking, run_of

TARGETS = {"ttft_target_seconds": 0.3, "tpot_target_seconds": 0.1}
NAUGHTY = """<b onclick="x">&amp; '$\\frac{1}{2}$' _"""


def page_of(runs: Sequence[PolicyRun], **more: object) -> str:
    given = {"title": "a title", "command": "aioserve simulate x", "facts": [("fact", "7")]}
    return report_page(runs, **(given | more))  # pyright: ignore[reportArgumentType]


def two_runs(name: str = "other") -> list[PolicyRun]:
    trace = [asking(n, at=n / 5, output=1 + n % 9, tenant=f"c{n % 3}") for n in range(20)]
    return [
        run_of(trace, targets=TARGETS, max_num_seqs=2),
        run_of(trace, name=name, targets=TARGETS, max_num_seqs=4, num_pages=12),
    ]


@pytest.fixture(scope="module")
def whole() -> str:
    return page_of(two_runs())


def test_everything_is_on_the_page(whole: str) -> None:
    for word in ("a title", "aioserve simulate x", "fact", "other", "c2 (6)", "goodput"):
        assert word in whole
    for section in read(whole).elements:
        if section[0] == "section":
            assert f'href="#{section[1]["id"]}"' in whole
    texts = [shown_texts(drawing) for drawing in drawings(whole)]
    assert sum({"50%", "90%", "99%", "99.9%"} <= set(found) for found in texts) == 4
    assert any("target 0.3 s" in found for found in texts)
    assert any("target 100 ms" in found for found in texts)
    assert sum({"c0", "c1", "c2"} <= set(found) for found in texts) == 3
    own = sum(window is not None for window in choose_windows(two_runs()).own)
    titles = re.findall("<h4 id=[^>]*>(fcfs|other), ", whole)
    assert titles[:2] == ["fcfs", "other"]
    assert len(titles) == 2 + own > 2


def test_nothing_is_fetched(whole: str) -> None:
    assert not re.search(r"<(link|img|iframe|object|embed|base|form)\b", whole)
    assert not re.search(r"\b(src|srcset|action|data)\s*=", whole)
    assert "@import" not in whole
    assert len(re.findall(r"<script\b", whole)) == 1
    for target in attributes(whole, "href"):
        assert target.startswith(("#", "data:text/csv;", "data:application/gzip;"))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", whole))
    assert not re.findall(r"\w+://[^\s\"'<]+", whole)


def test_only_its_own_style_and_script_may_run(whole: str) -> None:
    """Foreign styles and scripts have no hash in the page's policy, and attributes for either are
    forbidden."""
    (policy,) = [
        dict(found)["content"] or ""
        for tag, found in read(whole).elements
        if tag == "meta" and "http-equiv" in found
    ]
    assert policy.startswith("default-src 'none';")
    for kind in ("style", "script"):
        (body,) = re.findall(rf"<{kind}>(.*?)</{kind}>", whole, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not attributes(whole, "style")
    assert not [name for _, found in read(whole).elements for name in found if name[:2] == "on"]


def test_lines_and_text_have_the_colours_of_the_page(whole: str) -> None:
    body = whole[whole.index("</style>") :]
    assert not re.search(r'(fill|stroke|color)="(?!none)', body)
    assert "prefers-color-scheme: dark" in whole


def test_no_id_comes_twice_and_each_that_is_used_is_there(whole: str) -> None:
    ids = attributes(whole, "id")
    assert len(ids) == len(set(ids))
    used = {target[1:] for target in attributes(whole, "href") if target.startswith("#")}
    for name in ("aria-labelledby", "aria-describedby"):
        used |= {one for value in attributes(whole, name) for one in value.split()}
    used |= set(re.findall(r"url\(#([^)]+)\)", whole))
    assert used <= set(ids)


def test_every_picture_has_a_name_and_says_what_it_shows(whole: str) -> None:
    names = []
    for tag, found in read(whole).elements:
        if tag == "svg" and "aria-hidden" not in found and "preserveaspectratio" not in found:
            if "overflow" in found:
                continue
            assert found["role"] == "img"
            names.append(found.get("aria-label") or found["aria-labelledby"])
    assert all(names)
    for drawing in drawings(whole):
        if drawing.get("class", "").startswith("plot"):
            assert drawing.findtext("title")
            assert drawing.findtext("desc")


def test_every_table_has_a_caption_and_its_heads_say_of_what_they_are(whole: str) -> None:
    elements = read(whole).elements
    assert sum(tag == "table" for tag, _ in elements) == sum(
        tag == "caption" for tag, _ in elements
    )
    assert all(found.get("scope") in ("col", "row") for tag, found in elements if tag == "th")
    captions = re.findall(r"<caption[^>]*>(.*?)</caption>", whole, re.DOTALL)
    assert all(caption.strip() for caption in captions)
    assert len(set(captions)) == len(captions)


def test_headings_come_in_order(whole: str) -> None:
    levels = [int(tag[1]) for tag, _ in read(whole).elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert {2, 3} <= set(levels)


def test_the_file_of_requests_has_what_the_records_have(whole: str) -> None:
    head, *rows = downloads(whole)["requests.csv.gz"]
    runs = two_runs()
    records = [(run.name, record) for run in runs for record in run.result.requests]
    assert len(rows) == len(records) == 40
    for row, (name, record) in zip(rows, records, strict=True):
        cell = dict(zip(head, row, strict=True))
        request = record.request
        assert (cell["policy"], cell["request"], cell["tenant"]) == (
            name,
            str(request.number),
            request.tenant,
        )
        assert cell["ending"] == "finished"
        assert cell["output_tokens"] == str(record.output_tokens)
        assert record.first_token_seconds is not None
        ttft = record.first_token_seconds - request.arrival_seconds
        assert float(cell["ttft_seconds"]) == pytest.approx(ttft, abs=1e-6)
        assert cell["met_targets"] == ("yes" if met_targets(record) else "no")
    for run in runs:
        times = [float(row[head.index("ttft_seconds")]) for row in rows if row[0] == run.name]
        assert run.metrics.ttft_seconds is not None
        assert np.percentile(times, 99) == pytest.approx(run.metrics.ttft_seconds.p99, abs=1e-6)


def test_a_file_too_large_leaves_out_the_last_requests_of_all_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "MOST_BYTES", 800)
    text = page_of(two_runs())
    _, *rows = downloads(text)["requests.csv.gz"]
    kept = len(rows) // 2
    assert 0 < kept < 20
    assert [row[1] for row in rows] == [str(n) for n in range(kept)] * 2
    assert f"in order of arrival. Left out: the last {40 - 2 * kept}." in text


def test_the_same_runs_give_the_same_page(whole: str) -> None:
    assert page_of(two_runs()) == whole


def test_all_text_is_text() -> None:
    trace = [asking(n, tenant=NAUGHTY) for n in range(3)] + [asking(3, tenant="_")]
    runs = [run_of(trace, name=name, targets=TARGETS) for name in (NAUGHTY, "_hidden", "=1+1")]
    text = page_of(runs, title=NAUGHTY, command=NAUGHTY, facts=[(NAUGHTY, NAUGHTY)])
    reader = read(text)
    assert "<b onclick" not in text
    assert "b" not in {tag for tag, _ in reader.elements}
    assert sum(piece.strip() == NAUGHTY for piece in reader.shown) >= 12
    assert all(drawing is not None for drawing in drawings(text))
    files = downloads(text)
    assert {row[0] for row in files["requests.csv.gz"][1:]} == {NAUGHTY, "_hidden", "'=1+1"}
    assert NAUGHTY in files["figures.csv"][0]


@pytest.mark.parametrize(
    ("count", "output", "num_pages"),
    [(1, 4, None), (1, 1, None), (3, 4, 1), (50, 4, None)],
    ids=["one request", "one token", "none that fits", "all at once"],
)
def test_small_runs_can_be_drawn(count: int, output: int, num_pages: int | None) -> None:
    trace = [asking(n, output=output) for n in range(count)]
    without = page_of([run_of(trace, num_pages=num_pages)])
    assert 'id="targets"' not in without
    with_targets = run_of(trace, num_pages=num_pages, targets=TARGETS)
    assert 'id="targets"' in page_of([with_targets])
    assert not re.search(r"\bnan\b", without.lower())


def long_run(count: int, tenants: int = 50, prefix: str = "") -> PolicyRun:
    """Return a run of `count` requests, one a second, each with a wait of its own, in steps of 0.3
    s."""
    draw = np.random.default_rng(0)
    small = run_of([asking(0)])
    records, timeline = [], Timeline()
    for n in range(4 * count):
        timeline.steps.append(
            StepSample(
                began_seconds=0.3 * n,
                ended_seconds=0.3 * (n + 1),
                waiting=int(draw.integers(90)),
                running=int(draw.integers(90)),
                prefill_tokens=int(draw.integers(900)),
                decode_tokens=int(draw.integers(90)),
                pages_held=int(draw.integers(3)),
                pages_cached=1,
            )
        )
    for n in range(count):
        step = int((n + draw.exponential(30.0)) / 0.3) + 1
        begin, first, end = 0.3 * step, 0.3 * (step + 1), 0.3 * (step + 9)
        request = asking(n, at=float(n), output=9, tenant=f"{prefix}{n % tenants}")
        records.append(RequestRecord(request, Ending.FINISHED, 9, begin, first, end, n))
        prefill = Span(n, False, begin, first, 10, step)
        timeline.spans += [prefill, Span(n, True, first, end, 8, step + 8)]
    timeline.token_gaps = (draw.exponential(0.3, 4 * count), np.full(4 * count, 2))
    result = msgspec.structs.replace(small.result, requests=tuple(records), seconds=float(count))
    return PolicyRun("long", result, metrics_of(result), timeline)


@pytest.mark.more
def test_a_long_run_of_many_policies_makes_no_huge_page() -> None:
    run = long_run(12_000)
    text = page_of([PolicyRun(f"p{n}", run.result, run.metrics, run.timeline) for n in range(6)])
    assert len(text.encode()) < 2e6
    assert "Left out: 30 tenants with fewer." in text


@pytest.mark.more
def test_a_trace_of_many_tenants_with_long_and_hostile_names_makes_no_huge_page() -> None:
    run = long_run(6_000, tenants=2_000, prefix="<&'" * 160)
    text = page_of([PolicyRun(f"p{n}", run.result, run.metrics, run.timeline) for n in range(6)])
    assert len(text.encode()) < 2e6
    assert "left out: 1,800 with fewer requests" in text


def test_shares_of_memory_say_of_what() -> None:
    assert "All of the memory is 7 pages of 4 tokens." in page_of(
        [run_of([asking(0)], num_pages=7)]
    )
    assert "Memory has no limit: shares are of the 5 pages" in page_of([run_of([asking(0)])])


def too_long(name: str = "fcfs") -> PolicyRun:
    """Three requests, none of which fits the memory."""
    return run_of([asking(n) for n in range(3)], name=name, num_pages=1, targets=TARGETS)


def sections(text: str) -> list[str]:
    return [found["id"] or "" for tag, found in read(text).elements if tag == "section"]


def test_a_run_without_an_answer_is_told_in_words_and_not_drawn() -> None:
    text = page_of([too_long(), too_long(NAUGHTY)], window=(0.0, 1.0))
    told = " no request got a completion: 3 requests were too long for the model or the memory of "
    told += "1 page of 4 tokens. No step ran."
    shown = read(text).shown
    assert [f"Under {name}{told}" in shown for name in ("fcfs", NAUGHTY)] == [True, True]
    assert sections(text) == ["figures", "targets", "requests"]
    assert [found for found in attributes(text, "href") if found[:1] == "#"][:4] == [
        "#figures",
        "#figures",
        "#targets",
        "#requests",
    ]


def test_who_answered_is_drawn_beside_those_who_did_not() -> None:
    runs = [too_long(), run_of([asking(n) for n in range(3)], name="other", targets=TARGETS)]
    text = page_of(runs)
    assert "Under fcfs no request got a completion: 3 requests" in text
    assert "Under other no request" not in text
    assert {"latency", "queue", "steps", "lanes"} <= set(sections(text))
    assert re.findall(r"<h4 id=[^>]*>(.*?), ", text) == ["other"]
    assert 'class="lane"' in text


def test_a_tenant_that_was_never_answered_is_marked_beside_those_that_were() -> None:
    trace = [asking(0, tenant="short"), TraceRequest(1, 0.0, 99, 4, (), 10, tenant="long")]
    runs = [run_of(trace, name=name, num_pages=4) for name in ("fcfs", "other")]
    text = page_of(runs)
    drawing = next(one for one in drawings(text) if "Time to first token p99" in _title(one))
    assert shown_texts(drawing).count("never") == 1
    marks = [one for one in drawing.iter() if one.tag == "use"]
    places = [float((one.get("x") or "").rstrip("%")) for one in marks]
    assert len(places) == 4
    assert sorted(set(places))[-1] == 95.0
    assert sum(place == 95.0 for place in places) == 2
    assert max(place for place in places if place != 95.0) <= 85.0
    tips = [one.text for one in drawing.iter() if one.tag == "title"]
    assert "long\nfcfs: never\nother: never" in tips
    assert "At 'never': of their requests more than one in a hundred got no completion." in "".join(
        read(text).shown
    )
    (row,) = [row for row in downloads(text)["tenants.csv"] if row[0] == "long (1)"]
    assert row.count("never") == 2
    shown = page_of([run_of([asking(0, tenant="short")])])
    assert "never" not in "".join(map("".join, map(shown_texts, drawings(shown))))


def _title(drawing: ElementTree.Element) -> str:
    return next(one.text or "" for one in drawing.iter() if one.tag == "title")


def test_a_picture_of_nothing_says_so() -> None:
    text = page_of([run_of([asking(n, output=1) for n in range(3)])])
    told = [shown_texts(drawing).count("nothing to measure") for drawing in drawings(text)]
    assert told[:4] == [0, 1, 1, 0]
    assert sum(told) == 2
