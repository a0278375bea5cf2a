"""Device of the model: options of all verbs that open an engine, and messages at the start."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from aioserve import AioserveError, Engine
from aioserve.config import EngineConfig
from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.cli.terminal import Terminal

VERBS = [
    pytest.param(words, id=" ".join(words[:2]))
    for words in (
        ["run", "pyhelp", "x"],
        ["chat", "pyhelp"],
        ["bench", "throughput", "pyhelp"],
        ["bench", "latency", "pyhelp"],
    )
]
START = r"start [\d.]+ s: (\w+ [\d.]+ s, )+\w+ [\d.]+ s"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton isn't installed")


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Configs of engines that were entered; entering raises."""
    configs: list[EngineConfig] = []

    async def enter(engine: Engine) -> None:
        configs.append(engine.config)
        raise AioserveError("entered")

    monkeypatch.setattr(Engine, "__aenter__", enter)
    return configs


@pytest.mark.parametrize("words", VERBS)
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ((), ("auto", None, True)),
        (("--device", "cpu"), ("cpu", None, True)),
        (("--device", "cuda:1", "--graph-sizes", "8,2"), ("cuda:1", (8, 2), True)),
        (("--graph-sizes", "none", "--capture-graphs"), ("auto", (), True)),
        (("--device", "cuda", "--no-capture-graphs"), ("cuda", None, False)),
    ],
    ids=str,
)
def test_every_verb_with_an_engine_hands_it_the_device_and_the_graphs(
    aioserve_here: Run,
    entered: list[EngineConfig],
    words: list[str],
    options: tuple[str, ...],
    given: tuple[Any, ...],
) -> None:
    done = aioserve_here(*words, *options)
    assert done.stderr == "aioserve: entered\n"
    (config,) = entered
    assert (config.device, config.graph_sizes, config.capture_graphs) == given


@pytest.mark.parametrize("words", VERBS)
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ("--device", "gpu"),
            "device must be one of 'auto', 'cpu', 'cuda', or 'cuda:N' with N from 0 to 99, "
            "got 'gpu'",
        ),
        (
            ("--graph-sizes", "1,x"),
            "graph_sizes must be whole numbers with commas between them, such as 1,2,4, or none; "
            "got '1,x'",
        ),
        (("--graph-sizes", "0"), r"graph_sizes\[0\] must be an int in \[1, 65536\], got 0"),
        (
            ("--device", "cpu", "--graph-sizes", "1,2"),
            r"graph_sizes=\(1, 2\) has no effect with a model on the CPU: leave it out, or choose "
            "a CUDA device",
        ),
        (
            ("--graph-sizes", "none", "--no-capture-graphs"),
            r"capture_graphs=False has no effect with graph_sizes=\(\): there is nothing to "
            "capture",
        ),
        (("--device", "cuda:99"), "device='cuda:99' can't be used: .*"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_the_engine_refuses_is_one_line(
    aioserve_here: Run, words: list[str], options: tuple[str, ...], error: str
) -> None:
    done = aioserve_here(*words, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"aioserve: {error}\n", done.stderr), done.stderr


def test_what_the_start_took_is_told_where_it_is_asked_for(
    aioserve_here: Run, tiny_model: Path
) -> None:
    options = ("--max-tokens", 1, "--device", "cpu", "--raw")
    done = aioserve_here("run", tiny_model, "x", *options, "--verbose")
    (start, counts) = done.stderr.splitlines()
    assert re.fullmatch(rf"\[{START}\]", start)
    assert "weights" in start
    assert aioserve_here("run", tiny_model, "x", *options).stderr.count("\n") == 1
    assert "output token " in counts


def test_a_conversation_may_begin_with_what_the_start_took(aioserve: Run) -> None:
    done = aioserve("chat", "--verbose", "--device", "cpu", stdin="/exit\n")
    assert done.returncode == 0
    assert re.fullmatch(rf"\[{START}\]\n", done.stderr), done.stderr


@pytest.mark.more
@needs_triton
def test_bench_tells_what_the_start_on_a_device_took_and_which_it_was(
    forking: Forks, tiny_model: Path
) -> None:
    load = ["--num-prompts", "1", "--input-len", "2", "--output-len", "1"]
    graphs = ["--device", "cuda", "--graph-sizes", "1"]
    done = forking.run(
        ["bench", "latency", str(tiny_model), *load, *graphs, "--json", "-"],
        environment=os.environ,
        seconds=220,
        program="tests.cli.on_host_device",
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    parts = result["start"]["parts"]
    read = {"imports", "weights", "tokenizer", "decoder"}
    assert parts.keys() == read | {"attention", "kv_cache", "graphs", "warm_up"}
    assert result["start"]["seconds"] >= parts["kv_cache"] + parts["graphs"]
    assert result["options"]["graph_sizes"] == "1"
    assert result["machine"]["device"] == "cpu"


@pytest.mark.more
@needs_triton
def test_graphs_that_are_captured_show_on_a_terminal(forking: Forks, tiny_model: Path) -> None:
    words = ["run", str(tiny_model), "x", "--max-tokens", "1", "--verbose"]
    graphs = ["--device", "cuda", "--graph-sizes", "1"]
    on_host = "tests.cli.on_host_device"
    with Terminal(*words, *graphs, forks=forking, module=on_host, term="xterm") as terminal:
        terminal.expect("loading")
        terminal.expect("capturing graphs, [01] of 2")
        terminal.expect(r"\[start [\d.]+ s: .*graphs [\d.]+ s")
        assert terminal.exit_code() == 0
