"""The app whose tests the docs show: they pass, each of them, as its author would run them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTED = Path(__file__).resolve().parents[2] / "examples" / "tested_app"


def test_its_tests_pass(tmp_path: Path) -> None:
    folder = shutil.copytree(TESTED, tmp_path / "tested_app")
    tests = re.findall(r"^def test_", (folder / "test_weather_app.py").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:asyncio"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(tests)} passed" in done.stdout


ANSWERED = """
import asyncio, sys
from aioserve import Engine
from aioserve.testing import FakeModel

async def main():
    async with Engine(FakeModel(answers="It rains.")) as engine:
        answer = await engine.chat([{"role": "user", "content": "?"}]).completion()
        assert answer.content == "It rains."
        await engine.embed("rain")

asyncio.run(main())
sys.exit("torch" in sys.modules)
"""


def test_an_answer_of_a_fake_model_loads_no_torch() -> None:
    command = [sys.executable, "-W", "error", "-c", ANSWERED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
