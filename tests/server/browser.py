"""Headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.waits import LIMIT_SECONDS, block_until, until

__all__ = ["CHROMIUM", "Page", "browser", "opened"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-port=0",
)


@contextmanager
def browser(folder: Path) -> Iterator[int]:
    """Run a browser with its profile in `folder`, and yield the port at which it can be driven."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    said = folder / "DevToolsActivePort"
    try:
        block_until(lambda: process.poll() is not None or _is_said(said))
        assert process.poll() is None, "Chromium ended"
        yield int(said.read_text().split()[0])
    finally:
        process.terminate()
        process.wait(LIMIT_SECONDS)


def _is_said(path: Path) -> bool:
    return path.exists() and "\n" in path.read_text()


class Page:
    """One tab. It keeps messages of the console and the URLs of requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self.complaints: list[str] = []
        """Errors and warnings of the console, and uncaught exceptions."""
        self.asked: list[str] = []
        """URLs of all requests."""

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
                continue
            method, params = told["method"], told["params"]
            if method == "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                self.complaints.append(json.dumps(params["args"]))

    async def call(self, method: str, **params: Any) -> Any:
        self._last += 1
        answer = asyncio.get_running_loop().create_future()
        self._answers[self._last] = answer
        await self._socket.send_json({"id": self._last, "method": method, "params": params})
        told = await answer
        assert "error" not in told, told
        return told["result"]

    async def value(self, expression: str) -> Any:
        """Value of an expression in JavaScript, promises included."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression has a true value, and return it."""

        async def found() -> Any:
            if not (value := await self.value(expression)):
                await asyncio.sleep(0.02)  # the browser has other work
            return value

        return await until(found, told=lambda: expression)

    async def text(self, selector: str) -> str:
        return await self.value(f"document.querySelector({selector!r}).textContent")

    async def fill(self, selector: str, text: str) -> None:
        """Focus a field and replace its text."""
        await self.value(f"{{const e=document.querySelector({selector!r}); e.focus(); e.select()}}")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int = 0, text: str = "", modifiers: int = 0) -> None:
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def enter(self, modifiers: int = 0) -> None:
        await self.press("Enter", 13, "\r", modifiers)

    async def escape(self) -> None:
        await self.press("Escape", 27)

    async def tab(self) -> None:
        await self.press("Tab", 9)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self) -> bytes:
        """Image of the whole page, as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def opened(port: int, url: str, *, width: int = 1280) -> AsyncIterator[Page]:
    """Open `url` in a new tab."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
            tab = await answer.json()
        socket = await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=2**28)
        page = Page(socket)
        task = asyncio.create_task(page.listen())
        try:
            for domain in ("Network", "Runtime", "Log", "Page"):
                await page.call(f"{domain}.enable")
            await page.resize(width, 900)
            await page.call("Page.navigate", url=url)
            await page.until("document.readyState === 'complete'")
            yield page
        finally:
            await session.get(f"http://127.0.0.1:{port}/json/close/{tab['id']}")
            await socket.close()
            await task
