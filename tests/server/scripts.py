"""Server with a model that gives scripted answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.tokenizer import Tokenizer
from tests.engine.scripted import ScriptedModel
from tests.server.serving import client_of

__all__ = ["CALL", "CALLS", "PLAIN", "TEMPLATE", "TURNS", "SeenTemplate", "scripted", "with_tools"]

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %}THINK{{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls %}CALL{{ c.id }}{{ c.function | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}FOR{{ m.tool_call_id }}{{ m.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE = "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}{# </think> #}"
TEMPLATE += TURNS
PLAIN = "It rains."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo \u00c5"}}\n</tool_call>'
CALLS = f"<think>Hm.</think>Let me see. {CALL}\n{CALL}"


class SeenTemplate(ChatTemplate):
    """Chat template that keeps the prompts that it made."""

    prompts: list[str]

    def encode(self, messages: Any, tokenizer: Tokenizer, **options: Any) -> list[int]:
        ids = super().encode(messages, tokenizer, **options)
        self.prompts.append(tokenizer.decode(ids, skip_special_tokens=False))
        return ids


@asynccontextmanager
async def scripted(
    *answers: str, settings: ServerSettings | None = None, template: str = TEMPLATE, **options: Any
) -> AsyncIterator[tuple[SeenTemplate, Engine, httpx.AsyncClient]]:
    """Serve a scripted model: requests with the seed `i` get answer `i`. `options` are the
    model's."""
    model = ScriptedModel(template, *(answers or (PLAIN,)), **options)
    model.template = seen = SeenTemplate(template, origin="test")
    seen.prompts = []
    # A scripted model writes every token by itself.
    engine = Engine(model, jump_forward=False)
    async with engine, client_of(create_app(engine, settings)) as client:
        yield seen, engine, client


def with_tools(directory: Path) -> Path:
    """Copy of the embedded model with a template that reads tools."""
    for file in resources.files("aioserve.assets").joinpath("pyhelp").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = directory / "tokenizer_config.json"
    written = json.loads(config.read_text(encoding="utf-8"))
    written["chat_template"] = TEMPLATE
    config.write_text(json.dumps(written), encoding="utf-8")
    return directory
