"""Every code block of the documentation does what it says.

A ```python block runs, in the order of its page and in one namespace with the page's others. A
```console block's `$ aioserve` lines run and must exit with 0; for those that name
http://127.0.0.1:8000 a server of the embedded model is there, at another port. The info string can
say otherwise: `no-run` (needs something that a test has not), `gpu` (where none can be used, it is
run on the CPU, with "cpu" in the place of "cuda"), or a file below the repository that contains the
block word by word. A ```text printed``` block is what the last ```python block before it printed.
Other languages are not run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aioserve import ConfigError
from aioserve.cli import main
from aioserve.config import EngineConfig
from aioserve.execution.devices import chosen_device
from tests.cli.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MAX_BLOCKS_NOT_RUN = 6
SERVED_URL = "http://127.0.0.1:8000"
TAGS = ("", "no-run", "printed", "gpu")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    tag: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; `line` is where the fence opens."""
    found, opening, body = [], None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if opening is None:
                opening, body = (number, line[3:].strip()), []
            else:
                language, _, tag = opening[1].partition(" ")
                found.append(Block(page, opening[0], language, tag.strip(), "\n".join(body)))
                opening = None
        else:
            body.append(line)
    if opening is not None:
        raise ValueError(f"{page}:{opening[0]}: this fence is never closed")
    return found


EVERY_BLOCK = [block for page in PAGES for block in blocks(page)]


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_the_python_blocks_of_a_page_run_in_order(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for block in blocks(page):
        if block.tag == "printed":
            assert capsys.readouterr().out.strip() == block.text, f"{relative(page)}:{block.line}"
        if block.language == "python" and block.tag in ("", "gpu"):
            capsys.readouterr()
            text = block.text if block.tag == "" else on_this_machine(block)
            # Blank lines in front make a traceback show the page's own line numbers.
            source = "\n" * block.line + text
            exec(compile(source, relative(page), "exec", dont_inherit=True), namespace)


def on_this_machine(block: Block) -> str:
    """A block that names a GPU, or what it is without one."""
    assert '"cuda"' in block.text, f"{relative(block.page)}:{block.line} names no GPU"
    try:
        chosen_device(EngineConfig(device="cuda"))
    except ConfigError:
        return block.text.replace('"cuda"', '"cpu"')
    return block.text


def console_commands() -> list[Any]:
    return [
        pytest.param(line[2:], id=f"{relative(block.page)}:{line[2:]}")
        for block in EVERY_BLOCK
        if block.language == "console" and not block.tag
        for line in block.text.splitlines()
        if line.startswith("$ aioserve")
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run one after the other: what one writes, the next can read. README.md is
    there, as where they are typed."""
    made = tmp_path_factory.mktemp("commands")
    (made / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8"))
    return made


@pytest.fixture(scope="module")
def served_url() -> Iterator[str]:
    with ServerProcess("pyhelp") as server:
        yield server.url


@pytest.mark.parametrize("command", console_commands())
def test_the_commands_that_the_documentation_shows_work(
    command: str,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(directory)
    if SERVED_URL in command:
        command = command.replace(SERVED_URL, request.getfixturevalue("served_url"))
    _, *arguments = shlex.split(command)
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    output = capsys.readouterr()
    assert leaving.value.code == 0, output.err
    assert output.out.strip()


def test_blocks_that_quote_a_file_are_found_in_it() -> None:
    quoting = [block for block in EVERY_BLOCK if block.tag not in TAGS]
    assert quoting
    for block in quoting:
        place = f"{relative(block.page)}:{block.line}"
        assert (ROOT / block.tag).is_file(), f"{place} quotes {block.tag}, which does not exist"
        assert block.text in (ROOT / block.tag).read_text(encoding="utf-8"), (
            f"{place} differs from {block.tag}"
        )


def test_few_blocks_are_excused_from_running() -> None:
    excused = [f"{relative(b.page)}:{b.line}" for b in EVERY_BLOCK if b.tag == "no-run"]
    assert len(excused) <= MAX_BLOCKS_NOT_RUN, excused
