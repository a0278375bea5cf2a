"""Default sampling of a model in a GGUF file: that of the file, or else that of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioserve import Engine, SamplingParams
from aioserve.models.config import DecoderConfig
from aioserve.models.files import model_files
from aioserve.models.gguf.config import generation_of
from aioserve.models.gguf.copy import write_gguf
from aioserve.models.gguf.mixes import MIXES
from tests.models.gguf.conversion import convert, with_bytes_vocabulary
from tests.models.gguf.test_model import written
from tests.parity.tiny_models import CONFIGS

UNSAID = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
SAID: list[tuple[dict[str, Any], SamplingParams]] = [
    ({"temp": 0.6}, SamplingParams(temperature=0.6)),
    ({"top_k": 20}, SamplingParams(top_k=20)),
    ({"temp": 0.0, "penalty_repeat": 1.5},
     SamplingParams(temperature=0.0, repetition_penalty=1.5)),
    ({"temp": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1},
     SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1)),
]  # fmt: skip


@pytest.mark.asyncio
async def test_a_file_that_says_nothing_is_sampled_as_llama_cpp_does(tmp_path: Path) -> None:
    directory = with_bytes_vocabulary(written("llama", tmp_path / "random"), tmp_path / "hf")
    file = convert(directory, tmp_path / "x.gguf")
    for path, params in ((file, UNSAID), (directory, SamplingParams(temperature=0.0))):
        async with Engine(str(path)) as engine:
            assert engine.default_params == params
            assert engine.says_sampling is (path is directory)


@pytest.mark.parametrize(("said", "params"), SAID)
def test_a_file_that_says_something_is_sampled_so(
    said: dict[str, Any], params: SamplingParams
) -> None:
    metadata = {f"general.sampling.{key}": value for key, value in said.items()}
    config = DecoderConfig.from_dict(CONFIGS["llama"], generation=generation_of(metadata, "x.gguf"))
    assert config.generation.sampling_params() == params
    assert config.generation.is_said


@pytest.mark.parametrize(
    "generation",
    [
        None,
        {},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9},
        {"do_sample": False, "repetition_penalty": 1.25},
    ],
)
def test_a_copy_is_sampled_as_its_model_is(
    tmp_path: Path, generation: dict[str, Any] | None
) -> None:
    directory = written("llama", tmp_path / "hf")
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    write_gguf(directory, tmp_path / "x.gguf", MIXES["BF16"])
    expected, found = (
        model_files(path).config().generation for path in (directory, tmp_path / "x.gguf")
    )
    assert found.is_said
    assert found.sampling_params() == expected.sampling_params()
