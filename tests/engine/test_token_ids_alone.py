"""A model without a tokenizer serves token ids, and refuses requests for text, saying why."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from aioserve import (
    Engine,
    InvalidPromptError,
    InvalidSamplingError,
    ModelError,
    SamplingParams,
)
from aioserve.assets import model_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
OPTIONS: dict[str, Any] = {"num_pages": 64, "max_num_seqs": 4, "max_model_len": 256}


@pytest.fixture
def without_tokenizer(tmp_path: Path) -> str:
    """A copy of pyhelp without a tokenizer, its weights linked."""
    source = model_path("pyhelp")
    assert source is not None
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (tmp_path / file.name).symlink_to(file)
        elif file.is_file() and file.name != "tokenizer.json":
            shutil.copy(file, tmp_path)
    return str(tmp_path)


@pytest.mark.asyncio
async def test_token_ids_give_the_same_token_ids_without_a_tokenizer(without_tokenizer, caplog):
    async with Engine("pyhelp", **OPTIONS) as engine:
        assert engine.has_tokenizer
        prompt = engine.tokenizer.encode("import os\n")
        expected = await engine.generate(prompt, GREEDY)
    assert not caplog.records
    async with Engine(without_tokenizer, **OPTIONS) as engine:
        assert not engine.has_tokenizer
        completion = await engine.generate(prompt, GREEDY)
    assert completion.token_ids == expected.token_ids
    assert completion.finish_reason == expected.finish_reason
    assert completion.text == ""
    (record,) = caplog.records
    assert "has no tokenizer.json" in record.getMessage()
    assert "prompts must be token ids, and answers have no text" in record.getMessage()


@pytest.mark.parametrize(
    "prompt", ["import os\n", "import os\n" * 100, [{"role": "user", "content": "Hello"}]]
)
@pytest.mark.asyncio
async def test_text_is_refused_at_once_with_the_reason(without_tokenizer, prompt):
    async with Engine(without_tokenizer, **OPTIONS) as engine:
        assert not engine.has_chat_template
        with pytest.raises(InvalidPromptError, match=r"must be token ids.* no tokenizer\.json"):
            engine.stream(prompt, GREEDY)
        assert engine.stats().num_waiting == 0


@pytest.mark.asyncio
async def test_stop_strings_and_the_tokenizer_itself_are_refused_with_the_reason(
    without_tokenizer,
):
    (Path(without_tokenizer) / "tokenizer.model").write_bytes(b"")
    async with Engine(without_tokenizer, **OPTIONS) as engine:
        with pytest.raises(InvalidSamplingError, match=r"stop must be empty.*tokenizer\.model"):
            engine.stream([1, 2, 3], SamplingParams(stop="x"))
        with pytest.raises(ModelError, match="pip install transformers sentencepiece"):
            _ = engine.tokenizer
