"""A GGUF file is named as a directory is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.models.gguf.conversion import convert
from tests.models.gguf.vocabularies import write_byte_level


@pytest.fixture
def both(tiny_model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A directory, and the same model as a file."""
    directory, file = tmp_path / "hf", tmp_path / "files" / "tiny.gguf"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes((tiny_model / name).read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "bos_token_id": 1}))
    write_byte_level(directory)
    file.parent.mkdir()
    return directory, convert(directory, file)


def test_a_file_and_a_directory_that_holds_it_answer_as_the_model_does(
    aioserve_here: Run, both: tuple[Path, Path]
) -> None:
    directory, file = both
    said = [
        aioserve_here("run", model, "def f", "--max-tokens", 12, "--temperature", 0)
        for model in (directory, file, file.parent)
    ]
    assert [done.returncode for done in said] == [0, 0, 0], said[1].stderr
    assert said[0].stdout
    assert said[1].stdout == said[2].stdout == said[0].stdout


def test_doctor_and_plan_know_what_is_in_a_file(
    aioserve_here: Run, both: tuple[Path, Path]
) -> None:
    _, file = both
    facts = json.loads(aioserve_here("doctor", file, "--json").stdout)["model asked for"]
    assert facts["architecture"] == "Qwen3ForCausalLM"
    assert facts["tokenizer"] is True
    assert facts["weight_files"] == 1
    assert aioserve_here("plan", file).returncode == 0
