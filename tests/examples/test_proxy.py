"""nginx and promtool, where a machine has them, take the files for operators, and what these say of
streams holds."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioserve import Engine
from aioserve.server import create_app
from aioserve.testing import FakeModel
from tests.server.serving import client_of, listening
from tests.tiers import clock_counts
from tests.waits import LIMIT_SECONDS, until

DEPLOY = Path(__file__).resolve().parents[2] / "examples" / "deploy"
NGINX, OPENSSL, PROMTOOL = map(shutil.which, ("nginx", "openssl", "promtool"))
MOST = 2000
SLOW_STEP = 6
"""Number of the slow step. The tokens before it are far fewer than a proxy buffers."""
BODY: dict[str, Any] = {"model": "fake", "prompt": [1, 2], "max_tokens": MOST, "ignore_eos": True}

has_nginx = pytest.mark.skipif(NGINX is None or OPENSSL is None, reason="there is no nginx here")
has_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool here")


def configured(directory: Path, server: str, port: int) -> Path:
    """The example for that server and a port of ours, as all of a configuration."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    subprocess.run(
        [
            *(str(OPENSSL), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    example = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    for pattern, ours in (
        (r"127\.0\.0\.1:8000", server),
        (r"listen 443", f"listen 127.0.0.1:{port}"),
        (r"/etc/ssl/llm\.example\.com\.pem", str(certificate)),
        (r"/etc/ssl/llm\.example\.com\.key", str(key)),
    ):
        example, count = re.subn(pattern, ours, example)
        assert count == 1, pattern
    temporary = "".join(
        f"{name}_temp_path {directory}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = directory / "nginx.conf"
    whole.write_text(
        f"daemon off;\nmaster_process off;\npid {directory}/pid;\nerror_log stderr;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{example}\n}}\n"
    )
    return whole


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@asynccontextmanager
async def proxied(engine: Engine, directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of nginx in front of a server with that engine."""
    port = free_port()
    async with listening(create_app(engine)) as url:
        config = configured(directory, url.removeprefix("http://"), port)
        nginx = await asyncio.create_subprocess_exec(
            *(str(NGINX), "-p", str(directory), "-c", str(config)),
            stderr=asyncio.subprocess.DEVNULL,
        )
        trusted = ssl.create_default_context(cafile=directory / "certificate.pem")
        trusted.check_hostname = False
        try:
            async with httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=LIMIT_SECONDS
            ) as client:

                async def answers() -> bool:
                    assert nginx.returncode is None, "nginx didn't start"
                    return await _answers(client)

                await until(answers)
                yield client
        finally:
            if nginx.returncode is None:
                nginx.terminate()
            await nginx.wait()


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/v1/models")).status_code == 200
    except httpx.ConnectError:
        return False


@has_nginx
def test_nginx_takes_the_example_without_a_warning(tmp_path: Path) -> None:
    config = configured(tmp_path, "127.0.0.1:8000", free_port())
    done = subprocess.run(
        [str(NGINX), "-t", "-p", str(tmp_path), "-c", str(config)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "[warn]" in line]
    assert all('"listen ... http2" directive is deprecated' in line for line in warnings)


@pytest.mark.clock
@has_nginx
@pytest.mark.asyncio
async def test_tokens_come_through_the_proxy_as_they_are_made_and_leaving_ends_the_request(
    tmp_path: Path,
) -> None:
    steps = count()
    model = FakeModel(
        step_seconds=lambda _: 4.0 if next(steps) == SLOW_STEP else 0.005,
        num_pages=512,
        max_model_len=4096,
    )
    async with Engine(model) as engine, proxied(engine, tmp_path) as client:
        call = client.stream("POST", "/v1/completions", json=BODY | {"stream": True})
        async with call as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            first = await anext(lines)
            assert first.startswith("data: ")
            assert engine.stats().num_running == 1
            # It comes while the slow step is computed.
            assert not clock_counts() or engine.stats().tokens_generated_total <= SLOW_STEP
        await until(lambda: not engine.stats().num_running)
        assert engine.stats().tokens_generated_total < MOST
        whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: engine.stats().num_running)
        whole.cancel()
        await until(lambda: not engine.stats().num_running)
        assert engine.stats().tokens_generated_total < 2 * MOST


@has_promtool
def test_promtool_takes_the_example(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    example = (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
    config = tmp_path / "prometheus.yml"
    config.write_text(example.replace("/etc/prometheus/aioserve-key", str(key)))
    done = subprocess.run(
        [str(PROMTOOL), "check", "config", str(config)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@has_promtool
@pytest.mark.asyncio
async def test_promtool_finds_nothing_but_names_that_gateways_know_in_the_metrics() -> None:
    async with Engine(FakeModel()) as engine, client_of(create_app(engine)) as client:
        body = BODY | {"max_tokens": 4}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.post("/v1/completions", json=body | {"n": 0})).status_code == 400
        metrics = await client.get("/metrics")
    promtool = await asyncio.create_subprocess_exec(
        *(str(PROMTOOL), "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await promtool.communicate(metrics.content)
    names = re.compile(r"vllm:\w+ metric names should not contain ':'")
    found = [line for line in said.decode().splitlines() if line and not names.fullmatch(line)]
    assert not found
    assert promtool.returncode in (0, 3), "3 says that there is something to complain of"
