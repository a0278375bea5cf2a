"""Trace that is written while an engine serves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioserve import ConfigError, Engine, SamplingParams
from aioserve.server.step_log import trace as trace_module
from aioserve.server.step_log.trace import tracing
from aioserve.testing import FakeModel
from tests.waits import LIMIT_SECONDS, block_until, until

ANSWER = SamplingParams(max_tokens=30)


def opened(text: bytes) -> list[Any]:
    """Events of a truncated file, as Perfetto reads it: up to the last whole event."""
    try:
        return json.loads(text + b"]")
    except ValueError:
        return json.loads(text.rpartition(b"\n")[0].rstrip(b",") + b"]")


@pytest.mark.asyncio
async def test_a_trace_is_whole_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    async with Engine(FakeModel()) as engine, tracing(engine, path):
        await asyncio.gather(*[engine.generate([1, 2], ANSWER) for _ in range(5)])
    events = json.loads(path.read_bytes())
    assert sum(event["ph"] == "B" for event in events) == 5
    assert sum(event["ph"] == "E" for event in events) == 5
    decodes = [event for event in events if event["name"] == "decode"]
    assert sum(event["args"]["tokens"] for event in decodes) == 5 * 29


@pytest.mark.asyncio
async def test_a_pipe_is_refused_before_anybody_waits_for_its_reader(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(path)
    async with Engine(FakeModel()) as engine:
        for one in (path, link):
            with pytest.raises(ConfigError, match="trace must be a file"):
                async with tracing(engine, one):
                    pass
        assert not engine.dump()["observers"]


@pytest.mark.asyncio
async def test_an_engine_may_be_traced_from_before_it_is_entered_and_no_longer_than_asked(
    tmp_path: Path,
) -> None:
    engine = Engine(FakeModel())
    async with tracing(engine, tmp_path / "a"), engine:
        async with tracing(engine, tmp_path / "b"):
            await engine.generate([1, 2], ANSWER)
        await engine.generate([1, 2], ANSWER)
        assert len(engine.dump()["observers"]) == 1
    begun = [
        sum(event["ph"] == "B" for event in json.loads((tmp_path / name).read_bytes()))
        for name in "ab"
    ]
    assert begun == [2, 1]


PROGRAM = """
import asyncio, sys
from aioserve import ConfigError, Engine, SamplingParams
from aioserve.server.step_log.trace import tracing
from aioserve.testing import FakeModel

async def main():
    async with Engine(FakeModel()) as engine, tracing(engine, sys.argv[1]):
        while True:
            await engine.generate([1, 2], SamplingParams(max_tokens=30))

asyncio.run(main())
"""


@pytest.mark.more
def test_a_trace_whose_program_was_killed_opens(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)]) as process:
        while not path.exists() or path.stat().st_size < 20_000:
            assert process.poll() is None
        process.kill()
    text = path.read_bytes()
    whole = opened(text)
    assert any(event["name"] == "decode" for event in whole)
    for cut in range(1000, len(text), len(text) // 50):
        found = opened(text[:cut])
        assert found == whole[: len(found)]


@pytest.mark.asyncio
async def test_a_disk_that_fails_ends_the_trace_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(trace_module._TraceFile, "write", full)
    monkeypatch.setattr(trace_module, "PERIOD_SECONDS", 0.01)
    with caplog.at_level(logging.ERROR):
        async with Engine(FakeModel()) as engine, tracing(engine, tmp_path / "a"):
            await until(lambda: engine.dump()["observers"] == [])
            await engine.generate([1, 2], ANSWER)
    assert "no space left" in caplog.text


@pytest.mark.asyncio
async def test_a_disk_that_falls_behind_ends_the_trace_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(trace_module, "PERIOD_SECONDS", 100)
    with caplog.at_level(logging.ERROR):
        async with Engine(FakeModel()) as engine, tracing(engine, tmp_path / "a", max_pending=20):
            await engine.generate([1, 2], ANSWER)
            await until(lambda: not engine.dump()["observers"])
    assert "fell behind" in caplog.text
    json.loads((tmp_path / "a").read_bytes())


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    async with Engine(FakeModel()) as engine:
        with pytest.raises(OSError, match="nowhere"):
            async with tracing(engine, tmp_path / "nowhere" / "a"):
                pass


def test_a_server_that_is_killed_leaves_a_trace_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "aioserve", "serve", "--port", "0", "--trace", str(path)]
    with subprocess.Popen([*command, "--num-pages", "256"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = b""
        while b"is served at" not in said:
            said = process.stderr.readline()
            assert said, "the server ended"
        url = said.split(b"is served at ")[1].split(b";")[0].strip().decode()
        body = {"model": "pyhelp", "prompt": "import", "max_tokens": 20, "ignore_eos": True}
        assert (
            httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_SECONDS).status_code == 200
        )
        block_until(lambda: b'"ph":"E"' in path.read_bytes() or process.poll() is not None)
        process.kill()
    assert any(event["ph"] == "E" for event in opened(path.read_bytes()))
