"""Answers to a name that is no model: ways to name one, and similar models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from aioserve import Engine, ModelNotFoundError
from aioserve.models.hub import HubName
from aioserve.models.resolve import HUB_EXAMPLE, resolve, ways_to_name
from tests.cli.command import Run

WAYS = "a model is pyhelp, the embedded one; a path, as ./DIRECTORY with config.json or ./FILE.gguf"
COMMANDS = (
    "run llama3.2",
    "run llama3.2 hello",
    "chat llama3.2",
    "serve llama3.2",
    "serve llama3.2 --show-config",
    "bench latency llama3.2",
    "plan llama3.2",
    "quantize llama3.2 out --method int8",
    "evaluate llama3.2 --text text.txt",
    "calibrate llama3.2 --output out.json",
    "doctor llama3.2",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with models and other things."""
    (tmp_path / "Llama-3.2-1B").mkdir()
    (tmp_path / "Llama-3.2-1B" / "config.json").write_text("{}")
    (tmp_path / "llama3.2-q4.gguf").write_bytes(b"GGUF")
    (tmp_path / "llama-3.2").mkdir()
    (tmp_path / "llama3.3").write_text("no model")
    (tmp_path / "text.txt").write_text("Some text that is measured. " * 50)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told_of(name: str | Path) -> str:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    return str(caught.value)


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:3b", "llama3.2:latest", "Llama3.2"])
def test_a_word_is_told_what_names_a_model_and_which_are_like_it(here: Path, name: str) -> None:
    told = told_of(name)
    assert WAYS in told
    assert "./Llama-3.2-1B" in told
    assert "./llama3.2-q4.gguf" in told
    assert "./llama-3.2" not in told
    assert "llama3.3" not in told
    # There is no download of that name.
    assert f"hf download {name.partition(':')[0]}`" not in told
    assert "\n" not in told


def test_a_path_is_told_which_models_beside_it_are_like_it(here: Path) -> None:
    (here / "below").mkdir()
    (here / "Llama-3.2-1B").rename(here / "below" / "Llama-3.2-1B")
    told = told_of("below/llama-3.2-2b")
    assert told.endswith("near it in name: ./below/Llama-3.2-1B")
    assert WAYS not in told
    assert told_of(here / "below" / "x").endswith("no directory " + str(here / "below" / "x"))


def test_a_slip_of_the_embedded_model_is_told_that_alone(here: Path) -> None:
    told = told_of("pyhlep")
    assert "did you mean pyhelp?" in told
    assert WAYS not in told


def test_the_example_is_a_name_of_the_hub_and_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = HubName.of(HUB_EXAMPLE)
    assert name is not None
    assert not name.is_gguf
    assert f"`hf download {HUB_EXAMPLE}` puts it into the local cache" in ways_to_name()
    monkeypatch.setattr("aioserve.models.resolve.find_spec", lambda name: None)
    assert f"as {HUB_EXAMPLE} (pip install 'aioserve[hub]' first)" in ways_to_name()


def test_a_directory_that_nobody_can_list_and_names_that_terminals_obey_do_no_harm(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "qwen\x1b[2J.gguf").write_bytes(b"GGUF")
    told = told_of("qwen")
    assert "\x1b" not in told
    assert "qwen" in told.partition("near it in name: ")[2]
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(PermissionError(path)))
    assert "near it" not in told_of("qwen")
    assert "not found" in told_of("qwen\0")


@pytest.mark.asyncio
async def test_an_engine_says_the_same(here: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="a model is pyhelp, the embedded one"):
        async with Engine("llama3.2"):
            pass


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_says_the_same_in_a_line(here: Path, aioserve_here: Run, words: str) -> None:
    done = aioserve_here(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert WAYS in done.stderr
    assert "./llama3.2-q4.gguf" in done.stderr
    assert done.stderr.count("\n") == 1
    # Only commands with a prompt say what to type as one.
    assert ("aioserve run" in done.stderr) == (words == "run llama3.2")


def test_the_cache_of_the_hub_is_named_where_it_cannot_be_searched(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub is not installed" in told_of("llama3.2")
