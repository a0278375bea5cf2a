"""Options of other servers are answered with what they are called here."""

from __future__ import annotations

import inspect
import re

import pytest
from cyclopts import App

from aioserve.cli import app
from aioserve.cli._other_servers import ANSWERS, LOAD_ANSWERS, answer_for
from tests.cli.command import Run


def names_of(*commands: str) -> set[str]:
    found: App = app
    for command in commands:
        found = found[command]
    assert found.default_command is not None
    return set(inspect.signature(found.default_command).parameters)


@pytest.mark.parametrize("option", ANSWERS)
def test_every_answer_names_options_of_serve_and_is_needed(option: str) -> None:
    known = names_of("serve")
    assert option.removeprefix("--").replace("-", "_") not in known
    answer = answer_for(option, known)
    assert answer is not None
    assert answer.startswith(f"{option} isn't an option here: ")


@pytest.mark.parametrize("option", LOAD_ANSWERS)
def test_every_answer_names_options_of_bench_serve_and_is_needed(option: str) -> None:
    known = names_of("bench", "serve")
    assert option.removeprefix("--").replace("-", "_") not in known
    answer = answer_for(option, known)
    assert answer is not None
    assert answer.startswith(f"{option} isn't an option here: ")
    assert answer_for(option, names_of("run")) is None


def test_the_command_line_of_another_load_generator_is_answered(aioserve_here: Run) -> None:
    result = aioserve_here("bench", "serve", "http://127.0.0.1:1", "--request-rate", "4")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "aioserve: --request-rate isn't an option here: it is --rate\n"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--enable-prefix-caching", "prefixes are cached unless --no-prefix-caching is given"),
        ("--tensor-parallel-size=2", "a model runs on one device: several GPUs aren't supported"),
        ("--gpu_memory_utilization=0.5", "it is --memory-utilization"),
        ("--kv-cache-dtype=fp8", "the KV cache has the type of --dtype"),
        ("--served-model-name=x", "it is --served-model-names"),
        ("--speculative-config={}", "it is --speculation DRAFTER"),
        ("--model-draft=x", "it is --speculation model:path=PATH"),
    ],
)
def test_the_command_line_of_another_server_is_answered(
    given: str, told: str, aioserve_here: Run
) -> None:
    result = aioserve_here("serve", "pyhelp", given)
    assert (result.returncode, result.stdout) == (2, "")
    assert told in result.stderr
    assert "Did you mean" not in result.stderr
    assert not re.search(r"\n.", result.stderr)


def test_a_command_without_the_option_does_not_name_it(aioserve_here: Run) -> None:
    assert "capture_graphs" not in names_of("plan")
    result = aioserve_here("plan", "pyhelp", "--enforce-eager")
    assert "capture-graphs" not in result.stderr
    assert answer_for("--enforce-eager", names_of("plan")) is None
    assert answer_for("--unheard-of", names_of("serve")) is None
