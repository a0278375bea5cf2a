"""Client of a server of completions: asks for its model, sends requests, and records times.

Failures are recorded by kind, never raised: a load goes on. Knows neither arrivals nor figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec.structs import replace

from aioserve.cli._http_load.events import DONE, EventLines, Usage, decoded_chunk
from aioserve.cli._http_load.prompts import WORDS
from aioserve.errors import AioserveError, ConfigError
from aioserve.isolation import shown
from aioserve.simulation.records import Ending
from aioserve.simulation.served import ServedRequest
from aioserve.traces.trace_request import TARGETS, TraceRequest

__all__ = ["CompletionClient", "Endpoint", "ServerError", "StreamReading", "base_url_of"]

REFUSALS = (429, 503)
MAX_ERROR_BYTES = 2000
MAX_ANSWER_BYTES = 2**24
"""Most bytes of a server's answer with its model, or with token ids."""
IDLE_SECONDS = 4.0
"""Idle time after which a connection isn't used again, in seconds. Servers close idle ones, uvicorn
after 5 s, and a request sent at that moment gets no answer.
"""
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
EVENT_STREAM = "text/event-stream"
MAX_TOKEN_ID = 2**31
_UNREADABLE = (msgspec.MsgspecError, LookupError, TypeError, RecursionError)


class ServerError(AioserveError):
    """The server can't be measured: it isn't there, or its answer lacks what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of requests, and what each of them says beside its prompt and length."""

    base_url: str
    """URL without `/v1` and without a slash at the end."""
    kind: str = "completions"
    """API: `completions` or `chat`."""
    model: str
    ignore_eos: bool = True
    return_token_ids: bool = False
    hints: bool = False
    """Send what policies of aioserve read."""

    @property
    def url(self) -> str:
        return self.base_url + PATHS[self.kind]

    def body(self, request: TraceRequest, prompt: Sequence[int | str]) -> bytes:
        """Return the body of one request. Words of a prompt are joined by spaces."""
        content = prompt if prompt and isinstance(prompt[0], int) else " ".join(map(str, prompt))
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max(1, request.output_tokens),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.kind == "chat":
            body["messages"] = [{"role": "user", "content": content}]
        else:
            body["prompt"] = content
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.return_token_ids:
            body["return_token_ids"] = True
        if request.tenant:
            body["user"] = request.tenant
        if request.priority:
            body["priority"] = request.priority
        if self.hints:
            for target in TARGETS:
                if (seconds := getattr(request, target)) is not None:
                    body[target] = seconds
            if request.request_class:
                body["metadata"] = {"class": request.request_class}
            if request.session:
                body["session_id"] = request.session
            if request.predicted_output_tokens is not None:
                body["predicted_output_tokens"] = request.predicted_output_tokens
        return msgspec.json.encode(body)


def base_url_of(url: str) -> str:
    """Return the server's address without `/v1`. Raises `ConfigError` for an invalid one."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond bounds, half an IPv6 address
        is_one = False
    if not is_one or not base.isprintable() or set(base) & set(" @?#"):
        raise ConfigError(
            "url must be http://HOST:PORT or https://HOST:PORT, without a user, a query and "
            f"spaces, got {shown(url)}"
        )
    return base


class CompletionClient:
    """Keeps connections to one server. Use it as an async context manager."""

    def __init__(self, *, api_key: str | None = None, timeout_seconds: float = 600.0) -> None:
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_seconds = timeout_seconds
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> CompletionClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    # -- the server's model and tokens

    async def served_model(self, base_url: str) -> str:
        """Return the name of the first model that the server lists. Raises `ServerError`."""
        status, body = await self._asked("GET", base_url + "/v1/models")
        try:
            models = msgspec.json.decode(body)["data"]
            name = models[0]["id"]
        except _UNREADABLE:
            name = None
        if status != 200 or not isinstance(name, str):
            raise ServerError(
                f"{base_url}/v1/models names no model (status {status}: {_text_of(body)}): "
                "give --model"
            )
        return name

    async def ordinary_token_ids(self, base_url: str, model: str) -> list[int]:
        """Return ids of tokens of common words, for prompts. Raises `ServerError`."""
        asked = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
        status, body = await self._asked("POST", base_url + "/tokenize", asked)
        try:
            ids = msgspec.json.decode(body)["tokens"]
            found = sorted({one for one in ids if type(one) is int and 0 <= one < MAX_TOKEN_ID})
        except _UNREADABLE:
            found = []
        if status != 200 or len(found) < 2:
            raise ServerError(
                f"{base_url}/tokenize gives no token ids (status {status}: {_text_of(body)}): "
                "give --vocab-size, or --prompts text"
            )
        return found

    async def _asked(self, method: str, url: str, asked: object = None) -> tuple[int, bytes]:
        data = None if asked is None else msgspec.json.encode(asked)
        try:
            async with self._session.request(
                method, url, data=data, allow_redirects=False
            ) as response:
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise ServerError(
                            f"{url}: the answer has more than {MAX_ANSWER_BYTES} bytes"
                        )
                return response.status, bytes(body) or _elsewhere(response)
        except TimeoutError:
            raise ServerError(f"{url}: no answer in {self._timeout_seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{url}: {error or type(error).__name__}") from error

    # -- one request

    async def send(
        self,
        served: ServedRequest,
        endpoint: Endpoint,
        body: bytes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Send one request and read its stream to the end. Results are recorded in `served`."""
        reading = StreamReading(served)
        record = served.record
        served.is_sent = True
        record.request = replace(record.request, arrival_seconds=clock())
        try:
            async with self._session.post(
                endpoint.url, data=body, allow_redirects=False
            ) as response:
                if response.status != 200:
                    error = await response.content.read(MAX_ERROR_BYTES)
                    text = _text_of(error or _elsewhere(response))
                    kind = f"status {response.status}"
                    is_refusal = response.status in REFUSALS
                    reading.fail(kind, text, Ending.REFUSED if is_refusal else Ending.FAILED)
                elif response.content_type != EVENT_STREAM:
                    reading.fail("no stream", f"the content is {response.content_type}")
                else:
                    async for piece in response.content.iter_any():
                        reading.add(piece, clock())
                    reading.end()
        except TimeoutError:
            reading.fail("timeout", f"no end in {self._timeout_seconds:g} s")
        except aiohttp.ClientConnectorError as error:
            reading.fail("no connection", str(error))
        except (aiohttp.ClientError, OSError) as error:
            kind = "cut off" if reading.has_begun else "no answer"
            reading.fail(kind, str(error) or type(error).__name__)
        except msgspec.MsgspecError as error:
            reading.fail("unreadable", str(error))
        record.end_seconds = clock() if reading.last_seconds is None else reading.last_seconds


class StreamReading:
    """State of one stream that is being read."""

    def __init__(self, served: ServedRequest) -> None:
        self.has_begun = False
        self.last_seconds: float | None = None
        """Time of the last token."""
        self._served = served
        self._lines = EventLines()
        self._usage: Usage | None = None
        self._num_ids = 0
        self._is_whole = False
        self._piece_seconds = 0.0

    def add(self, piece: bytes, now: float) -> None:
        self.has_begun = True
        self._piece_seconds = now
        for data in self._lines.of(piece):
            self._take(data)

    def _take(self, data: bytes) -> None:
        if data == DONE:
            self._is_whole = True
            return
        chunk = decoded_chunk(data)
        if chunk.error is not None:
            self.fail("error in the stream", _message_of(chunk.error))
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices or ():
            if choice.has_tokens:
                self._tokens_came(len(choice.token_ids or ()), self._piece_seconds)
            if choice.finish_reason:
                self._is_whole = True

    def _tokens_came(self, num_ids: int, now: float) -> None:
        served, record = self._served, self._served.record
        served.chunks += 1
        self._num_ids += num_ids
        record.output_tokens = self._num_ids or served.chunks
        if self.last_seconds is None:
            record.first_token_seconds = now
        else:
            gap = now - self.last_seconds
            served.gap_seconds.append(gap)
            record.max_gap_seconds = max(gap, record.max_gap_seconds or 0.0)
        self.last_seconds = now

    def end(self) -> None:
        """Finish a stream that ended without an error of the connection."""
        served, record, usage = self._served, self._served.record, self._usage
        for data in self._lines.end():
            self._take(data)
        if served.failure:
            return
        if not self._is_whole:
            self.fail("cut off", "the stream ended without a finish_reason and [DONE]")
            return
        if usage is not None and usage.completion_tokens is not None:
            served.has_usage = True
            record.output_tokens = usage.completion_tokens
            record.cached_tokens = usage.cached_tokens
            prompt_tokens = usage.prompt_tokens or record.request.prompt_tokens
            record.request = replace(record.request, prompt_tokens=prompt_tokens)
        is_short = record.output_tokens < max(1, record.request.output_tokens)
        record.ending = Ending.CUT_SHORT if is_short else Ending.FINISHED

    def fail(self, kind: str, detail: str, ending: Ending = Ending.FAILED) -> None:
        """Record a failure. The first one counts."""
        if not self._served.failure:
            self._served.failure, self._served.detail = kind, detail
            self._served.record.ending = ending


def _elsewhere(response: aiohttp.ClientResponse) -> bytes:
    """Return where a server redirects to. Redirects aren't followed: another server would be
    measured.
    """
    where = response.headers.get("location", "")
    return f"it redirects to {where}".encode(errors="replace") if where else b""


def _text_of(body: bytes) -> str:
    """Return the message of an error, or the body in its place, in one line."""
    try:
        return _message_of(msgspec.json.decode(body)["error"])
    except _UNREADABLE:
        return " ".join(body[:MAX_ERROR_BYTES].decode(errors="replace").split())


def _message_of(error: object) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:MAX_ERROR_BYTES]
