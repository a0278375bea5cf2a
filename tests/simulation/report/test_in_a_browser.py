"""The page in headless Chromium: what it says under the pointer and the keys, what it gives away,
and that it fits."""

from __future__ import annotations

import csv
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aioserve.simulation.report import report_page
from tests.server.browser import CHROMIUM, Page, browser, opened
from tests.simulation.report.runs import asking, run_of
from tests.waits import until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

TARGETS = {"ttft_target_seconds": 0.3}
NAUGHTY = "<img src=x onerror=document.title='bad'>"
READOUT = "document.getElementById('readout').textContent"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = [asking(n, at=n / 9, output=1 + n % 20, tenant=f"{NAUGHTY} {n % 3}") for n in range(40)]
    runs = [run_of(trace, name=name, targets=TARGETS, num_pages=60) for name in ("fcfs", NAUGHTY)]
    text = report_page(runs, title="a title", command="aioserve " * 60, facts=[("fact", "7")])
    path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(text, encoding="utf-8")
    return path


@asynccontextmanager
async def shown(port: int, file: Path, width: int = 1200) -> AsyncIterator[Page]:
    async with opened(port, file.as_uri(), width=width) as page:
        yield page
        assert page.complaints == []


async def point_at(page: Page, selector: str) -> None:
    found = f"document.querySelector({selector!r})"
    await page.value(f"{found}.scrollIntoView({{block: 'center'}})")
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    await page.value(frame)  # scrolling puts the text away
    x, y = await page.value(
        f"{{const r = {found}.getBoundingClientRect(); [r.x + r.width / 2, r.y + r.height / 2]}}"
    )
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


def rows_of(path: Path) -> list[list[str]]:
    """Return the rows of a file, or none until the file is there and whole."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return list(csv.reader(text.splitlines())) if text.endswith("\n") else []


@pytest.mark.asyncio
async def test_the_page_asks_nobody_and_nothing_is_complained_of(port: int, file: Path) -> None:
    async with shown(port, file) as page:
        await page.value(
            "document.querySelectorAll('details').forEach((one) => { one.open = true })"
        )
        assert await page.value("document.title") == "a title"
        assert await page.value("document.querySelectorAll('img').length") == 0
        assert page.asked == [file.as_uri()]


@pytest.mark.asyncio
async def test_a_script_that_came_in_does_not_run(port: int, file: Path) -> None:
    async with opened(port, file.as_uri()) as page:
        await page.value(
            "{const s = document.createElement('script'); s.textContent = 'document.title = 1';"
            "document.body.append(s)}"
        )
        assert await page.value("document.title") == "a title"
        assert any("Content Security Policy" in one for one in page.complaints)


@pytest.mark.asyncio
async def test_the_pointer_shows_what_is_under_it(port: int, file: Path) -> None:
    async with shown(port, file) as page:
        await point_at(page, "#latency .hit:nth-child(7)")
        told = await page.until(READOUT)
        assert told.startswith("99.0% at most\nfcfs: ")
        assert f"\n{NAUGHTY}: " in told
        await point_at(page, ".lane .prefill")
        assert "prefill of " in await page.until(READOUT)
        await page.escape()
        assert await page.value(READOUT) == ""


@pytest.mark.asyncio
async def test_arrow_keys_reach_what_the_pointer_does(port: int, file: Path) -> None:
    async with shown(port, file) as page:
        for selector in ("#queue svg.plot", ".lanes"):
            await page.value(f"document.querySelector({selector!r}).focus()")
            seen: list[str] = []
            for _ in range(3):
                await page.press("ArrowRight", 39)
                seen.append(await page.value(READOUT))
            assert all(seen)
            assert len(set(seen)) == 3
            await page.press("ArrowLeft", 37)
            assert await page.value(READOUT) == seen[1]
        await page.press("End", 35)
        last = await page.value(READOUT)
        await page.press("ArrowUp", 38)
        above = await page.value(READOUT)
        assert last.split(" ")[0] != above.split(" ")[0]  # another request


@pytest.mark.asyncio
async def test_one_stop_of_tab_is_enough_for_a_picture(port: int, file: Path) -> None:
    async with shown(port, file) as page:
        stops = "document.querySelectorAll('svg.plot[tabindex], .lanes[tabindex]').length"
        pictures = "document.querySelectorAll('svg.plot, .lanes').length"
        assert await page.value(stops) == await page.value(pictures)
        assert await page.value("document.querySelectorAll('.hit[tabindex]').length") == 0
        await page.tab()
        assert await page.value("document.activeElement.className") == "skip"


@pytest.mark.asyncio
@pytest.mark.parametrize("width", [320, 400, 1200])
async def test_nothing_is_wider_than_the_screen(port: int, file: Path, width: int) -> None:
    async with shown(port, file, width) as page:
        await page.value(
            "document.querySelectorAll('details').forEach((one) => { one.open = true })"
        )
        assert await page.value("document.documentElement.scrollWidth") <= width
        sizes = (
            "[...document.querySelectorAll('svg text')].map((one) => one.getBoundingClientRect())"
        )
        assert await page.value(f"Math.min(...{sizes}.map((one) => one.height)) ") >= 11
        inside = (
            f"{sizes}.filter((one) => one.height && (one.left < 0 || one.right > {width})).length"
        )
        assert await page.value(inside) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("width", [320, 1200])
async def test_what_is_said_of_nobody_answered_is_seen_and_fits(
    port: int, tmp_path: Path, width: int
) -> None:
    runs = [run_of([asking(n) for n in range(3)], name=NAUGHTY, num_pages=1, targets=TARGETS)]
    path = tmp_path / "page.html"
    path.write_text(report_page(runs, title="a title", command="x", facts=[]), encoding="utf-8")
    async with shown(port, path, width) as page:
        assert "no request got a completion: 3 requests were too long" in await page.text(
            "#figures p"
        )
        assert await page.value("document.querySelector('#figures p').offsetHeight") > 10
        assert await page.value("document.documentElement.scrollWidth") <= width
        assert await page.value("document.querySelectorAll('nav a').length") == 3


@pytest.mark.asyncio
async def test_the_table_of_requests_is_seen_whole_whatever_policies_and_tenants_are_called(
    port: int, tmp_path: Path
) -> None:
    trace = [asking(n, tenant="tenant-of-a-name-that-is-long-" + "x" * 99) for n in range(3)]
    name = "deadline:reject=false,default_ttft_seconds=2.5"
    path = tmp_path / "page.html"
    path.write_text(
        report_page([run_of(trace, name=name)], title="a title", command="x", facts=[]),
        encoding="utf-8",
    )
    async with shown(port, path, 1280) as page:
        table = "document.querySelector('#requests .scroll')"
        assert await page.value(f"{table}.scrollWidth <= {table}.clientWidth")


@pytest.mark.asyncio
async def test_the_downloaded_file_is_unpacked(port: int, file: Path, tmp_path: Path) -> None:
    async with shown(port, file) as page:
        await page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        await page.value("document.querySelector('a[data-packed]').click()")
        await page.until("!document.querySelector('a[data-packed]')")
        rows = await until(lambda: rows_of(tmp_path / "requests.csv"))
        head = rows.pop(0)
        assert head[:3] == ["policy", "request", "tenant"]
        assert len(rows) == 80
        assert rows[-1][0] == NAUGHTY
