"""The page: whole, on its own, bounded, and with all text as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from aioserve.errors import ConfigError
from aioserve.simulation.metrics import Targets, metrics_of
from aioserve.simulation.report import PolicyRun, check_can_draw, page, report_page
from aioserve.simulation.simulator import Ending, RequestRecord
from aioserve.simulation.timeline import Span, StepSample, Timeline
from tests.simulation.report.runs import asking, run_of

TARGETS = Targets(ttft_seconds=0.3, tpot_seconds=0.1)
NAUGHTY = """<b onclick="x">&amp; '$\\frac{1}{2}$' _"""


def page_of(runs: Sequence[PolicyRun], **more: object) -> str:
    given = {"title": "a title", "command": "aioserve simulate x", "facts": [("fact", "7")]}
    return report_page(runs, **(given | more))  # pyright: ignore[reportArgumentType]


def two_runs(name: str = "other") -> list[PolicyRun]:
    trace = [asking(n, at=n / 5, output=1 + n % 9, client=f"c{n % 3}") for n in range(20)]
    return [
        run_of(trace, targets=TARGETS, max_num_seqs=2),
        run_of(trace, name=name, targets=TARGETS, max_num_seqs=4, num_pages=12),
    ]


def drawings(text: str) -> list[ElementTree.Element]:
    found = re.findall(r"<svg role=.*?</svg>", text, flags=re.DOTALL)
    return [ElementTree.fromstring(svg) for svg in found]


def texts(drawing: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in drawing.iter() if element.tag.endswith("text")]


class Reader(HTMLParser):
    """Collects text."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


@pytest.fixture(scope="module")
def whole() -> str:
    return page_of(two_runs(), targets=TARGETS)


def test_everything_is_on_the_page(whole: str) -> None:
    for word in ("a title", "aioserve simulate x", "fact", "other", "c2 (6)", "goodput"):
        assert word in whole
    labels = [drawing.get("aria-label") or "" for drawing in drawings(whole)]
    assert len(labels) == 7
    assert len(set(labels)) == 7
    assert all(drawing.get("viewBox") for drawing in drawings(whole))
    latency, targets, clients, queue, batch, *gantts = map(texts, drawings(whole))
    assert {"s", "ms", "share of requests", "target 0.3 s", "target 100 ms"} <= set(latency)
    assert {"fcfs", "other", "share of requests"} <= set(targets)
    assert {"c0", "c1", "c2", "tokens computed for others"} <= set(clients)
    assert {"Requests that wait", "requests", "seconds on the trace's clock"} <= set(queue)
    assert {"fcfs: prefill", "other: KV pages", "share of pages", "tokens of a step"} <= set(batch)
    assert all("c1 #1" in lanes for lanes in gantts)


def test_nothing_is_fetched(whole: str) -> None:
    assert not re.search(r"<(script|link|img|iframe|object|embed|base|form)\b", whole)
    assert not re.search(r"\b(src|srcset|action|data)\s*=", whole)
    assert "@import" not in whole
    assert all(target.startswith("#") for target in re.findall(r"href=\"([^\"]*)\"", whole))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", whole))
    assert set(re.findall(r"\w+://[^\s\"'<]+", whole)) <= {"http://www.w3.org/1999/xlink"}


def test_lines_and_text_have_the_colour_of_the_page(whole: str) -> None:
    assert "currentColor" in whole
    assert "color-scheme: light dark" in whole
    assert not re.search(r"#(000000|ffffff|0b0c0d)", whole)


def test_no_id_comes_twice_and_each_that_is_used_is_there(whole: str) -> None:
    ids = re.findall(r" id=\"([^\"]+)\"", whole)
    used = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", whole))
    assert len(ids) == len(set(ids))
    assert used == set(ids)


def test_the_same_runs_give_the_same_page(whole: str) -> None:
    assert page_of(two_runs(), targets=TARGETS) == whole


def test_all_text_is_text() -> None:
    trace = [asking(n, client=NAUGHTY) for n in range(3)] + [asking(3, client="_")]
    runs = [run_of(trace, name=name, targets=TARGETS) for name in (NAUGHTY, "_hidden", "$x_1$")]
    text = page_of(runs, title=NAUGHTY, command=NAUGHTY, facts=[(NAUGHTY, NAUGHTY)])
    assert "<b onclick" not in text
    reader = Reader()
    reader.feed(text)
    assert sum(piece.strip() == NAUGHTY for piece in reader.shown) >= 6
    assert {"$x_1$: prefill", "_hidden: prefill"} <= set(texts(drawings(text)[-4]))


@pytest.mark.parametrize(
    ("count", "output", "num_pages"),
    [(1, 4, None), (1, 1, None), (3, 4, 1), (50, 4, None)],
    ids=["one request", "one token", "none that fits", "all at once"],
)
def test_small_runs_can_be_drawn(count: int, output: int, num_pages: int | None) -> None:
    trace = [asking(n, output=output) for n in range(count)]
    assert len(drawings(page_of([run_of(trace, num_pages=num_pages)]))) == 4
    with_targets = run_of(trace, num_pages=num_pages, targets=TARGETS)
    assert len(drawings(page_of([with_targets], targets=TARGETS))) == 5


def long_run(count: int) -> PolicyRun:
    """So many requests, one a second, of which each takes times of its own, in steps of 0.3 s."""
    draw = np.random.default_rng(0)
    small = run_of([asking(0)])
    records, timeline = [], Timeline()
    for n in range(count):
        begin, first, end = (n + np.cumsum(draw.exponential(30.0, 3))).tolist()
        request = asking(n, at=float(n), output=9, client=f"{n % 50}")
        records.append(RequestRecord(request, Ending.FINISHED, 9, begin, first, end, n))
        timeline.spans += [Span(n, False, begin, first, 10, 0), Span(n, True, first, end, 8, 0)]
    for n in range(3 * count):
        timeline.steps.append(
            StepSample(
                began_seconds=0.3 * n,
                ended_seconds=0.3 * n + 0.3,
                waiting=int(draw.integers(90)),
                running=int(draw.integers(90)),
                prefill_tokens=int(draw.integers(900)),
                decode_tokens=int(draw.integers(90)),
                pages_held=int(draw.integers(3)),
                pages_cached=1,
            )
        )
    result = msgspec.structs.replace(small.result, requests=tuple(records), seconds=float(count))
    return PolicyRun("long", result, metrics_of(result), timeline)


def test_a_long_run_of_many_policies_makes_no_huge_page() -> None:
    run = long_run(12_000)
    text = page_of([PolicyRun(f"p{n}", run.result, run.metrics, run.timeline) for n in range(6)])
    assert len(text.encode()) < 2e6
    assert "Left out: 30 clients with fewer." in text


def test_shares_of_memory_say_of_what() -> None:
    assert "All of the memory is 7 pages of 4 tokens." in page_of(
        [run_of([asking(0)], num_pages=7)]
    )
    assert "Memory has no limit: shares are of the 5 pages" in page_of([run_of([asking(0)])])


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'aioserve\[report\]'"):
        check_can_draw()
