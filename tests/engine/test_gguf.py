"""An engine takes a GGUF file like a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioserve import Engine, SamplingParams
from tests.models.gguf.conversion import convert
from tests.models.gguf.vocabularies import write_byte_level
from tests.parity.tiny_models import write

pytestmark = pytest.mark.asyncio

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
async def test_a_file_serves_as_the_directory_that_it_was_made_from(
    tmp_path: Path, name: str
) -> None:
    directory = write(name, tmp_path / "hf")
    write_byte_level(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    file = convert(directory, tmp_path / "x.gguf")
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    said = []
    for model in (directory, file):
        async with Engine(str(model), dtype="float32") as engine:
            plain = await engine.generate("def f", greedy)
            chat = await engine.chat([{"role": "user", "content": "hello"}], greedy).completion()
            said.append((plain.token_ids, plain.text, chat.answers[0].content))
    assert said[1] == said[0]
