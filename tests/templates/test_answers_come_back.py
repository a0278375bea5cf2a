"""Answers of a server come back through published templates that know tools.

`AIOSERVE_TEMPLATES` names a directory with them (`*.jinja`); they aren't part of this repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aioserve.text.chat_template import ChatTemplate
from aioserve.text.conversation import conversation_of
from tests.text.test_carried_forms import ASKED, WRITTEN, carried

DIRECTORY = os.environ.get("AIOSERVE_TEMPLATES", "")
FILES = sorted(Path(DIRECTORY).rglob("*.jinja")) if DIRECTORY else []
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a place up.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

pytestmark = pytest.mark.skipif(not FILES, reason="AIOSERVE_TEMPLATES names no templates")


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_calls_without_text_reach_the_prompt(file: Path, content: str | None) -> None:
    template = ChatTemplate.from_file(file, special_tokens=TOKENS)
    if not template.reads("tools") or not template.reads("tool_calls"):
        pytest.skip("reads no calls of tools")
    for arguments, seen in WRITTEN.items():
        prompt = template.render(conversation_of(carried(content, arguments), tools=[TOOL]))
        behind = prompt.rpartition(ASKED)[2]
        assert seen == "look_up" or seen in behind, (arguments, prompt)
        assert "none" not in behind.lower(), (arguments, prompt)
        assert "rain" in behind, (arguments, prompt)
