"""Page at `/` in headless Chromium, with an engine, and with a server of scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from aioserve import Engine, SamplingParams
from aioserve.server import create_app
from aioserve.server.page import PAGE_PATHS, page_routes
from tests.server.browser import CHROMIUM, Page, browser, opened
from tests.server.serving import listening, served
from tests.waits import until

in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
HOSTILE = ["<script>document.title='bad'</script>", "<img src=x onerror=alert(1)>", "&amp; **x**"]
ANSWERED = "!!document.querySelector('.turn .figures')"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@asynccontextmanager
async def shown(port: int, width: int = 1280) -> AsyncIterator[tuple[Engine, Page]]:
    """Open the page of an engine. At the end, there must be no complaints, and no requests
    elsewhere."""
    async with (
        Engine(num_pages=256) as engine,
        listening(create_app(engine)) as url,
        opened(port, url, width=width) as page,
    ):
        await page.until("document.getElementById('model').value === 'pyhelp'")
        await page.value("document.querySelector('input[value=completion]').click()")
        yield engine, page
        assert page.complaints == []
        assert page.asked
        assert all(asked.startswith((url, "blob:")) for asked in page.asked)


class FakeServer:
    """Server in the OpenAI format with scripted answers."""

    def __init__(self, deltas: list[dict[str, Any]], *, key: str | None = None) -> None:
        self.deltas = deltas
        self.key = key
        self.bodies: list[Any] = []
        self.app = Starlette(
            routes=[
                *page_routes(),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/live", self.live),
            ]
        )

    def refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "<b>no key</b>"}}, 401)

    async def models(self, request: Request) -> Response:
        return self.refusal(request) or JSONResponse({"data": [{"id": "fake"}]})

    async def live(self, request: Request) -> Response:
        if refusal := self.refusal(request):
            return refusal
        about = {"has_chat_template": True}
        numbers = {"tokens_per_step": 2.5, "fill_ratio": 0.75}
        update = {"now_seconds": 1.0, "state": "open", "open": [], "log": [], "about": about}
        update |= {"numbers": numbers}

        async def events() -> AsyncIterator[str]:
            yield f"data: {json.dumps(update)}\n\n"
            await asyncio.sleep(3600)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def chat(self, request: Request) -> Response:
        if refusal := self.refusal(request):
            return refusal
        body = await request.json()
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "fail":
            return JSONResponse({"error": {"message": "<i>refused</i>"}}, 400)

        async def events() -> AsyncIterator[str]:
            for delta in self.deltas:
                yield self.event({"choices": [{"index": 0, "delta": delta}]})
            yield self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
            yield self.event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @staticmethod
    def event(value: Any) -> str:
        return f"data: {json.dumps(value)}\n\n"


@asynccontextmanager
async def shown_fake(port: int, server: FakeServer) -> AsyncIterator[Page]:
    async with listening(server.app) as url, opened(port, url) as page:
        yield page


@in_chromium
@pytest.mark.asyncio
async def test_a_completion_streams_into_the_page(port: int) -> None:
    async with shown(port) as (engine, page):
        await page.value("document.querySelector('[name=temperature]').value = 0")
        await page.value("document.querySelector('[name=max_tokens]').value = 300")
        await page.fill("#prompt", "json.dumps")
        await page.enter()
        await page.until("document.querySelector('.answer')?.textContent.length > 5")
        assert await page.value("document.querySelector('.turn').classList.contains('going')")
        assert await page.value("document.getElementById('answers').ariaBusy") == "true"
        await page.until(ANSWERED)
        whole = await engine.generate("json.dumps", SamplingParams(temperature=0, max_tokens=300))
        assert await page.text(".answer") == whole.text
        figures = await page.text(".turn .figures")
        assert f"{whole.usage.completion_tokens} tokens" in figures
        assert "tokens/s" in figures
        assert f"ended by {whole.finish_reason.value}" in figures


@in_chromium
@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["button", "escape"])
async def test_who_stops_an_answer_ends_its_request(port: int, how: str) -> None:
    async with shown(port) as (engine, page):
        await page.value("document.querySelector('[name=max_tokens]').value = 900")
        await page.fill("#prompt", "x")
        await page.enter()
        await page.until("document.querySelector('.answer')?.textContent.length > 5")
        if how == "button":
            await page.value("document.getElementById('stop').click()")
        else:
            await page.escape()
        await page.until(ANSWERED)
        assert "ended by you" in await page.text(".turn .figures")
        await until(lambda: not engine.stats().num_running)
        await until(lambda: not engine.stats().pages_held_by_requests)
        assert engine.stats().tokens_generated_total < 900
        assert await page.value("document.getElementById('stop').disabled")
        assert not await page.value("document.getElementById('send').disabled")


@in_chromium
@pytest.mark.asyncio
async def test_the_page_works_by_keyboard(port: int) -> None:
    async with shown(port) as (_, page):
        await page.value("document.activeElement.blur()")
        passed: list[str] = []
        for _ in range(14):
            await page.tab()
            focus = "document.activeElement.id || document.activeElement.textContent"
            passed.append((await page.value(focus)).strip())
            if passed[-1] == "prompt":
                break
        assert passed[:2] == ["Playground", "Engine"]
        assert passed[-3:] == ["model", "answers", "prompt"]
        await page.call("Input.insertText", text="one")
        await page.enter(modifiers=8)  # Shift
        await page.call("Input.insertText", text="two")
        assert await page.value("document.getElementById('prompt').value") == "one\ntwo"
        await page.enter()
        await page.until(ANSWERED)
        assert await page.text(".prompt") == "one\ntwo"
        unnamed = """[...document.querySelectorAll('input, select, textarea, button, canvas')]
            .filter((e) => !(e.labels?.length || e.textContent.trim()
                             || e.getAttribute('aria-labelledby')))
            .map((e) => e.outerHTML)"""
        assert await page.value(unnamed) == []


@in_chromium
@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 400, 1280])
async def test_the_live_view_is_legible(port: int, scheme: str, width: int) -> None:
    async with shown(port, width) as (engine, page):
        await page.prefer(scheme)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        await asyncio.gather(*[engine.generate("import os\n" * n, params) for n in range(1, 20)])
        await page.value("document.querySelectorAll('details').forEach((one) => one.open = true)")
        await page.until("document.getElementById('rows').children.length === 19")
        await page.until(
            "document.querySelectorAll('#rows tr:first-child td')[4].textContent == 30"
        )
        await page.until("document.getElementById('gantt-said').textContent.startsWith('19 in')")
        assert await page.value("document.documentElement.scrollWidth") <= width
        colours = f"""{CONTRAST}; [...document.querySelectorAll(
            'h1, h2, h3, p, a, label, dt, dd, li, td, th, button:enabled, summary')]
            .filter((e) => e.textContent && e.offsetWidth && contrast(e) < 4.5)
            .map((e) => [e.outerHTML, contrast(e)])"""
        assert await page.value(colours) == []
        for name in ("prefill", "decode", "cached", "queued", "preempted"):
            assert await page.value(f"{CONTRAST}; ofState({name!r})") >= 3.0


CONTRAST = """
var numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
var light = (colour) => {
  const [r, g, b] = numbers(colour).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
var ratio = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
var behind = (e) => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (numbers(colour)[3] !== 0) return colour;
  }
};
var contrast = (e) => ratio(light(getComputedStyle(e).color), light(behind(e)));
var ofState = (name) => {
  const e = document.querySelector('#engine');
  const probe = e.appendChild(document.createElement('b'));
  probe.style.color = `var(--${name})`;
  const found = contrast(probe);
  probe.remove();
  return found;
}"""


@in_chromium
@pytest.mark.asyncio
async def test_what_a_model_writes_is_text(port: int) -> None:
    server = FakeServer([{"reasoning_content": HOSTILE[1]}, *({"content": t} for t in HOSTILE)])
    async with shown_fake(port, server) as page:
        await page.until("document.getElementById('model').value === 'fake'")
        await page.fill("#prompt", HOSTILE[0])
        await page.enter()
        await page.until(ANSWERED)
        assert await page.text(".answer") == "".join(HOSTILE)
        assert await page.text(".reasoning") == HOSTILE[1]
        assert await page.text(".mine pre") == HOSTILE[0]
        assert await page.value("document.title") == "aioserve"
        assert (
            await page.value("document.querySelectorAll('.answers script, .answers img').length")
            == 0
        )
        assert page.complaints == []


@in_chromium
@pytest.mark.asyncio
async def test_a_chat_goes_on_with_what_was_said_and_as_is_set(port: int) -> None:
    server = FakeServer([{"content": "yes"}])
    async with shown_fake(port, server) as page:
        await page.until("document.getElementById('model').value === 'fake'")
        await page.value("document.getElementById('settings').open = true")
        settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7}
        for name, value in settings.items():
            await page.fill(f"[name={name}]", str(value))
        await page.fill("[name=max_tokens]", "64")
        await page.fill("#stops", "END\n\nSTOP")
        await page.fill("#system", "be short")
        for number, text in enumerate(["first", "second"], 1):
            await page.fill("#prompt", text)
            await page.enter()
            await page.until(f"document.querySelectorAll('.turn .figures').length === {number}")
        first, second = server.bodies
        assert first == {
            "model": "fake",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {"role": "system", "content": "be short"},
                {"role": "user", "content": "first"},
            ],
            "max_completion_tokens": 64,
            "stop": ["END", "STOP"],
            **settings,
        }
        assert second["messages"][1:] == [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "second"},
        ]
        await page.value("document.getElementById('clear').click()")
        assert await page.value("document.getElementById('answers').children.length") == 0


@in_chromium
@pytest.mark.asyncio
async def test_an_error_is_told_as_text_and_the_prompt_stays(port: int) -> None:
    async with shown_fake(port, FakeServer([])) as page:
        await page.until("document.getElementById('model').value === 'fake'")
        await page.fill("#prompt", "fail")
        await page.enter()
        await page.until(ANSWERED)
        assert await page.text("#problem") == "<i>refused</i>"
        assert await page.value("document.getElementById('prompt').value") == "fail"


@in_chromium
@pytest.mark.asyncio
async def test_a_key_is_asked_for_where_the_server_wants_one(port: int) -> None:
    server = FakeServer([{"content": "yes"}], key="secret")
    async with shown_fake(port, server) as page:
        await page.until("!document.getElementById('key-form').hidden")
        await page.until("document.getElementById('problem').textContent === '<b>no key</b>'")
        await page.fill("#key", "secret")
        await page.enter()
        await page.until("document.getElementById('model').value === 'fake'")
        assert await page.value("document.getElementById('key-form').hidden")
        await page.until("document.getElementById('state').textContent === 'open'")
        shown = ("per-step", "filled")
        numbers = [await page.value(f"document.getElementById('{id}').textContent") for id in shown]
        assert numbers == ["2.5", "75 %"]
        assert await page.value("Object.values(sessionStorage).join()") == "secret"
        assert await page.value("Object.values(localStorage).length + document.cookie.length") == 0
        await page.fill("#prompt", "x")
        await page.enter()
        await page.until(ANSWERED)
        assert await page.text(".answer") == "yes"


@in_chromium
@pytest.mark.asyncio
async def test_no_key_is_asked_for_where_none_is_wanted(port: int) -> None:
    async with shown(port) as (_, page):
        await page.until("document.getElementById('state').textContent === 'open'")
        assert await page.value("document.getElementById('key-form').hidden")
        assert await page.value("Object.values(sessionStorage).length") == 0


@pytest.mark.asyncio
async def test_the_files_of_the_page_may_load_nothing_from_elsewhere() -> None:
    async with served(num_pages=256) as (_, client):
        for path in PAGE_PATHS:
            answer: httpx.Response = await client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            for line in answer.text.splitlines():
                assert "://" not in line or path.endswith("icon.svg"), f"{path}: {line}"
                assert "innerHTML" not in line


def test_the_page_is_small() -> None:
    folder = Path(create_app.__code__.co_filename).parent / "page"
    assert sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".py") < 60_000


@in_chromium
@pytest.mark.asyncio
async def test_one_can_chat_with_the_embedded_model(port: int) -> None:
    async with shown(port) as (_, page):
        await page.value("document.querySelector('input[value=chat]').click()")
        await page.value("document.querySelector('[name=max_tokens]').value = 20")
        await page.fill("#prompt", "What does json.dumps do?")
        await page.enter()
        await page.until(ANSWERED)
        assert await page.text("#problem") == ""
        assert await page.text(".answer")
        assert await page.text(".mine pre") == "What does json.dumps do?"
