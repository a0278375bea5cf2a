"""`aioserve serve` as a process: its first lines, its signals, and its refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.server_process import ServerProcess
from tests.cli.slow_steps import SLOW_FILE
from tests.waits import LIMIT_SECONDS

LONG: dict[str, Any] = {
    "model": "pyhelp",
    "prompt": "import os\n",
    "max_tokens": 4000,
    "ignore_eos": True,
    "stream": True,
}


class Reading(threading.Thread):
    """Client that reads one stream to its end."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = body
        self.begun = threading.Event()
        self.events: list[str] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=160
            ) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.begun.set()
        except Exception as error:
            self.error = error

    @property
    def ends(self) -> list[str]:
        return [event for event in self.events if event == "[DONE]" or "error" in json.loads(event)]


def test_the_first_curl_that_it_shows_is_answered() -> None:
    with ServerProcess() as server:
        url = server.url
        line = server.expect(r"try: (.*)")[1]
        words = shlex.split(line)
        assert words[0] == "curl"
        if shutil.which("curl") is not None:
            done = subprocess.run([*words, "-s"], capture_output=True, text=True, timeout=160)
            answer = json.loads(done.stdout)
        else:
            data = words[words.index("-d") + 1]
            headers = {"content-type": "application/json"}
            answer = httpx.post(words[1], content=data, headers=headers, timeout=160).json()
        assert answer["usage"]["completion_tokens"] >= 1
        assert httpx.get(f"{url}/ready").json() == {"status": "ready", "engine": "open"}
        server.send(signal.SIGINT)
        assert server.exit_code() == 0
        assert "Traceback" not in server.errors


@pytest.fixture
def slow_file(tmp_path: Path) -> Path:
    """File that makes the steps of a `slow_server` slow until it is removed."""
    path = tmp_path / "slow"
    path.touch()
    return path


@pytest.fixture
def slow_server(forking: Forks, slow_file: Path) -> Callable[..., ServerProcess]:
    named = {SLOW_FILE: str(slow_file)}
    return partial(ServerProcess, forks=forking, module="tests.cli.slow_steps", **named)


@pytest.mark.more
def test_sigterm_refuses_new_requests_and_lets_streams_end(
    slow_file: Path, slow_server: Callable[..., ServerProcess]
) -> None:
    with slow_server("--drain-seconds", 600) as server:
        url = server.url
        body = LONG | {"max_tokens": 1000}
        streams = [Reading(url, body) for _ in range(2)]
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as client:
            assert client.get("/ready").status_code == 200
            for stream in streams:
                assert stream.begun.wait(LIMIT_SECONDS), stream.error
            server.send(signal.SIGTERM)
            server.expect("draining for at most 600 s: 2 running")
            ready = client.get("/ready")
            assert (ready.status_code, ready.json()["engine"]) == (503, "draining")
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) >= 1
        time.sleep(0.3)  # a server that closes its listener has done so by now
        assert streams[0].is_alive(), "the answers are too short to see anything"
        assert httpx.get(f"{url}/ready").status_code == 503
        slow_file.unlink()
        assert server.exit_code() == 0
        for stream in streams:
            stream.join(LIMIT_SECONDS)
            assert stream.error is None
            assert stream.ends == ["[DONE]"]
        assert server.errors.rstrip().endswith("drained")


@pytest.mark.more
def test_a_server_goes_on_where_nobody_reads_what_it_says() -> None:
    command = [sys.executable, "-m", "aioserve", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = re.search(r"http://[0-9.:]+", process.stderr.readline())
            assert url is not None
            process.stderr.close()
            body = {"model": "pyhelp", "prompt": "a", "max_tokens": 1}
            for _ in range(2):
                answer = httpx.post(f"{url[0]}/v1/completions", json=body, timeout=160)
                assert answer.status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_SECONDS) == 0
        finally:
            process.kill()


@pytest.mark.more
def test_the_deadline_of_a_drain_ends_streams_with_an_error(
    slow_server: Callable[..., ServerProcess],
) -> None:
    with slow_server("--drain-seconds", 0.2) as server:
        stream = Reading(server.url, LONG)
        assert stream.begun.wait(LIMIT_SECONDS), stream.error
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        stream.join(LIMIT_SECONDS)
        assert stream.error is None
        [end] = stream.ends
        assert json.loads(end)["error"]["code"] == "draining"
        assert stream.events[-1] == end
        assert "1 request was ended by --drain-seconds" in server.errors


def test_a_second_signal_ends_at_once(
    tmp_path: Path, slow_server: Callable[..., ServerProcess]
) -> None:
    path = tmp_path / "serve.sock"
    with slow_server("--uds", path, "--drain-seconds", 600) as server:
        assert server.url == "http://localhost"
        assert path.is_socket()
        transport = httpx.HTTPTransport(uds=str(path))
        with (
            httpx.Client(transport=transport, base_url="http://localhost") as client,
            client.stream("POST", "/v1/completions", json=LONG) as answer,
        ):
            assert next(answer.iter_lines())
            server.send(signal.SIGTERM)
            server.expect("a second signal ends at once")
            server.send(signal.SIGINT)
            assert server.exit_code() == 130
        assert not path.exists()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Certificate of localhost, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl isn't installed")
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-out", str(files[0]), "-keyout", str(files[1])),
        ],
        check=True,
        capture_output=True,
    )
    return files


@pytest.mark.more
def test_a_server_with_tls_and_keys_answers_those_who_have_one(
    forking: Forks, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    keys = tmp_path / "keys"
    keys.write_text("# of the tests\nci=correct-horse-battery\n")
    options = ("--tls-cert-file", cert, "--tls-key-file", key, "--api-key-file", keys)
    with ServerProcess(*options, forks=forking) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=server.url, verify=context, timeout=LIMIT_SECONDS) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 401
            headers = {"authorization": "Bearer correct-horse-battery"}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert "Bearer $KEY" in server.expect(r"try: (.*)")[1]
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        assert "horse" not in server.errors


# -- refusals before a model loads


@pytest.fixture
def taken_port() -> Any:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2
    assert not done.stdout
    [line] = done.stderr.strip().splitlines()
    return line


def test_a_port_in_use_is_one_line(aioserve_here: Run, taken_port: int) -> None:
    line = one_line(aioserve_here("serve", "--port", taken_port))
    assert f"port {taken_port} of 127.0.0.1" in line
    assert "in use" in line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_host_that_others_can_reach_needs_a_key(aioserve_here: Run, host: str) -> None:
    line = one_line(aioserve_here("serve", "--host", host, "--port", 0))
    assert "--api-key-file" in line
    assert "--allow-without-key" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--page-size", "3"], "--page-size: page_size must be one of"),
        (["--page-size", "x"], "--page-size must be a whole number"),
        (["--max-bodybytes", "3"], "--max-bodybytes"),
        (["--port", "70000"], "--port: port must be an int in [0, 65535], got 70000"),
        (["--num-pages", "9", "--memory-utilization", "0.5"], "--memory-utilization: memory_util"),
        (["--tls-cert-file", "/no/such.pem"], "/no/such.pem"),
        (["--tls-key-file", "/no/such.pem"], "no effect without tls_cert_file"),
        (["--config", "/no/such.toml"], "/no/such.toml"),
        (["--api-key-file", "/no/such.keys"], "/no/such.keys"),
        (["--uds", "/no/such/dir/x"], "/no/such/dir/x"),
        (["--uds", "/dev/zero"], "file of another kind"),
        (["--uds", "/tmp/x", "--port", "1"], "--port: port has no effect"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--api-key", "a=key-of-some-length", "--operators", "b"], "operators must be names"),
        (["--operators", "b"], "operators must be names of api_keys, which are none"),
    ],
)
def test_a_mistake_is_one_line(aioserve_here: Run, arguments: list[str], named: str) -> None:
    assert named in one_line(aioserve_here("serve", *arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ["/no/such/model"],
        ["--policy", "nosuch"],
        ["--policy", "fcfs:nosuch=1"],
        ["--eviction", "nosuch"],
        ["--speculation", "nosuch"],
        ["--host", "0.0.0.0"],
        ["--tls-cert-file", "/no/such.pem"],
        ["--operators", "b"],
        ["--api-key", "short"],
        ["--allowed-hosts", "http://a"],
        ["--allowed-origins", "a"],
        ["--trace", "FIFO"],
    ],
    ids=" ".join,
)
def test_show_config_refuses_what_is_not_served_in_the_same_words(
    aioserve_here: Run, tmp_path: Path, arguments: list[str]
) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    words = [str(fifo) if word == "FIFO" else word for word in arguments]
    shown = aioserve_here("serve", *words, "--show-config")
    assert shown.returncode == 2, shown.stdout
    assert not shown.stdout
    served = aioserve_here("serve", *words, "--port", 0)
    assert (served.returncode, served.stderr) == (2, shown.stderr)


def test_a_unix_socket_that_answers_is_in_use_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    from aioserve.errors import ConfigError
    from aioserve.server.listening import Listening, bound

    listening = Listening(uds=str(tmp_path / "serve.sock"))
    with bound(listening) as [taken]:
        taken.listen()
        with pytest.raises(ConfigError, match="in use"), bound(listening):
            pass
        assert (tmp_path / "serve.sock").is_socket()
    assert not (tmp_path / "serve.sock").exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "serve.sock"))
    with bound(listening) as [replaced]:
        replaced.listen()


# -- settings


@pytest.mark.more
def test_tools_are_served_by_a_template_and_a_parser_of_flags(
    forking: Forks, tmp_path: Path
) -> None:
    file = tmp_path / "tools.jinja"
    file.write_text("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    function = {"name": "f", "parameters": {"type": "object"}}
    asked = {
        "model": "pyhelp",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 4,
    }
    for flags, status in (((), 400), (("--tool-parser", "hermes"), 200)):
        options = ("--chat-template", file, "--num-pages", 64, *flags)
        with ServerProcess(*options, forks=forking) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=160)
            assert answer.status_code == status, answer.text
            assert status == 200 or "--tool-parser" in answer.text


@pytest.mark.more
def test_parsers_are_settings_of_the_engine_wherever_they_are_said(
    aioserve: Run, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[engine]\ntool_parser = "mistral"\nchat_template = "a.jinja"\n')
    done = aioserve(
        *("serve", "--config", file, "--show-config", "--tool-parser", "json"),
        AIOSERVE_REASONING_PARSER="qwen3",
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r'tool_parser = "json" +# --tool-parser', done.stdout)
    assert re.search(r'reasoning_parser = "qwen3" +# AIOSERVE_REASONING_PARSER', done.stdout)
    assert re.search(r'chat_template = "a.jinja" +# .*: engine.chat_template', done.stdout)
    done = aioserve("serve", "--tool-parser", "openai", "--show-config")
    assert done.returncode == 2
    assert "tool_parser: no tool parser 'openai'; there are: auto, deepseek_v3," in done.stderr


def test_show_config_prints_each_value_with_its_origin_as_a_file_that_says_the_same(
    aioserve_here: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[engine]\nseed = 7\npage_size = 8\n[server]\nmax_n = 4\nhost = "::1"\n')
    monkeypatch.setenv("AIOSERVE_PAGE_SIZE", "32")
    monkeypatch.setenv("AIOSERVE_MAX_N", "5")
    done = aioserve_here(
        *("serve", "pyhelp", "--config", file, "--max-n", 6, "--no-overlap"),
        *("--show-config", "--api-key", "ci=correct-horse", "--served-model-names", "a,b"),
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if " = " in line]
    lines = {row.split(" = ")[0]: row.split("#")[1].strip() for row in rows}
    assert lines["model"] == "MODEL"
    assert lines["seed"] == f"{file}: engine.seed"
    assert lines["page_size"] == "AIOSERVE_PAGE_SIZE"
    assert lines["max_n"] == "--max-n"
    assert lines["overlap"] == "--overlap"
    assert lines["port"] == "default"
    assert "correct-horse" not in done.stdout
    shown = tomllib.loads(done.stdout)
    assert shown["engine"]["page_size"] == 32
    assert shown["engine"]["overlap"] is False
    assert shown["server"]["served_model_names"] == ["a", "b"]
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    monkeypatch.delenv("AIOSERVE_PAGE_SIZE")
    monkeypatch.delenv("AIOSERVE_MAX_N")
    repeated = aioserve_here("serve", "--config", again, "--show-config")
    assert tomllib.loads(repeated.stdout) == shown


@pytest.mark.more
def test_help_tells_what_flags_take_and_where_else_they_are_set(aioserve: Run) -> None:
    help_ = aioserve("serve", "--help").stdout
    assert "--port INT" in help_
    assert "--drain-seconds FLOAT" in help_
    assert "key_value" in help_
    assert "AIOSERVE_PAGE_SIZE" in help_


def test_a_flag_takes_what_its_variable_takes(aioserve: Run) -> None:
    shown = aioserve("serve", "--num-pages", "none", "--graph-sizes", "1,2", "--show-config")
    assert "# num_pages: none" in shown.stdout
    assert "graph_sizes = [1, 2]" in shown.stdout
