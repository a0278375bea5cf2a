"""Every code block of the documentation does what it says, with nothing installed but what its page
has installed above it.

A ```python block runs, in the order of its page and in one namespace with the page's others. A
```console block's `$ aioserve` lines run and must exit with 0; for those that name
http://127.0.0.1:8000 a server of the embedded model is there, at another port, and `plugins check`
tries few examples. The info string can
say otherwise: `no-run` (needs something that a test has not), `gpu` (where none can be used, it is
run on the CPU, with "cpu" in the place of "cuda"), or a file below the repository that contains the
block word by word. A ```text printed``` block is what the last ```python block before it printed.
Other languages are not run.

A page begins with what `pip install .` brings, and its lines `pip install` add to that. What isn't
run is there all the same: commands that packages bring, and what programs import.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.cli.server_process import ServerProcess
from tests.docs.pages import PAGES, ROOT, Block, Command, blocks, commands, relative
from tests.docs.readers import Readers, readers

MAX_BLOCKS_NOT_RUN = 6
SERVED_URL = "http://127.0.0.1:8000"
TAGS = ("", "no-run", "printed", "gpu")
EVERY_BLOCK = [block for page in PAGES for block in blocks(page)]
EVERY_COMMAND = [command for page in PAGES for command in commands(page)]
FIRST_PAGES = {ROOT / "README.md", *(ROOT / "docs" / "tutorial").glob("*.md")}
"""Pages that `make test` runs; the others come with `make test-more`."""
SCRIPTS = {point.name for point in entry_points(group="console_scripts")}
IN_PLACE = {
    "serve": ("serve", "--show-config"),
    "plugins check": ("plugins", "check", "fcfs", "--examples", "1"),
}
"""Commands that show that packages are there, in the place of those that can't run."""


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    """Commands run one after the other in one folder: what one writes, the next can read. Packages
    of `PYTHONPATH` are none of a page's."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("openai", "uvicorn"):
        (elsewhere / f"{name}.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(elsewhere))
        with readers(tmp_path_factory.mktemp("readers")) as reading:
            patch.undo()
            yield reading


@pytest.fixture(scope="module")
def served_url() -> Iterator[str]:
    with ServerProcess("pyhelp") as server:
        yield server.url


def later(page: Path) -> tuple[pytest.MarkDecorator, ...]:
    return () if page in FIRST_PAGES else (pytest.mark.more,)


every_page = pytest.mark.parametrize(
    "page", [pytest.param(page, id=relative(page), marks=later(page)) for page in PAGES]
)


@every_page
def test_the_python_blocks_of_a_page_run_in_order(page: Path, reading: Readers) -> None:
    found = blocks(page)
    programs = [one for one in found if one.language == "python" and one.tag in ("", "gpu")]
    for block in programs:
        if block.tag == "gpu":
            assert '"cuda"' in block.text, f"{relative(page)}:{block.line} names no GPU"
    printed = reading.program(page, programs)
    for block in found:
        if block.tag == "printed":
            (*_, line) = (line for line in printed if line < block.line)
            assert printed[line].strip() == block.text, f"{relative(page)}:{block.line}"


def told(command: Command) -> str:
    return f"{relative(command.page)}:{' '.join(command.words)}"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, id=told(one), marks=later(one.page))
        for one in EVERY_COMMAND
        if one.is_run and one.words[0] == "aioserve"
    ],
)
def test_the_commands_that_the_documentation_shows_work(
    command: Command, reading: Readers, request: pytest.FixtureRequest
) -> None:
    words = list(command.words[1:])
    for index, word in enumerate(words):
        if word.startswith(SERVED_URL):
            words[index] = word.replace(SERVED_URL, request.getfixturevalue("served_url"))
    if words[:2] == ["plugins", "check"] and "--examples" not in words:
        words += ["--examples", "5"]
    done = reading.command(command.page, command.line, words)
    assert done["code"] == 0, done["err"]
    assert done["out"].strip()


def find_packages(page: Path, reading: Readers) -> None:
    """Raises `AssertionError` where one is missing of what the page names and doesn't run."""
    for command in commands(page):
        match command.words:
            case ("aioserve", "plugins", "new", name, *_) if not (
                reading.folder / name.replace("-", "_")
            ).exists():
                reading.command(page, command.line, command.words[1:])
    for command in commands(page):
        place = f"{relative(page)}:{command.line}"
        first, *words = command.words
        if first == "aioserve" and not command.is_run:
            wanted = [IN_PLACE[key] for key in IN_PLACE if " ".join(words).startswith(key)]
            shown = wanted[0] if wanted else (*words[:1], "--help")
            done = reading.command(page, command.line, shown)
            assert done["code"] == 0, f"{place}: {done['err']}"
        elif first in SCRIPTS - {"pip"}:
            there = reading.has_script(page, command.line, first)
            assert there, f"{place} needs {first}, and no `pip install` above brings it"
        for path in programs(command):
            reading.imports(page, command.line, path)
    for block in blocks(page):
        if block.language == "python" and block.tag not in TAGS:
            reading.imports(page, block.line, ROOT / block.tag)


def programs(command: Command) -> list[Path]:
    """Files of the repository that a command for python or uvicorn runs."""
    paths = []
    match command.words:
        case ("python", path, *_):
            paths = [ROOT / path]
        case ("uvicorn", "--app-dir", folder, app):
            paths = [ROOT / folder / f"{app.partition(':')[0]}.py"]
    return [path for path in paths if path.is_file()]


@every_page
def test_what_a_page_does_not_run_finds_its_packages(page: Path, reading: Readers) -> None:
    find_packages(page, reading)


@pytest.mark.parametrize(
    ("name", "line", "missing"),
    [
        ("docs/how-to/embed-in-web-apps.md", "pip install fastapi uvicorn", "uvicorn"),
        ("docs/how-to/embed-in-web-apps.md", "pip install aiohttp", "aiohttp"),
        ("docs/how-to/use-openai-clients.md", "pip install openai", "openai"),
        ("docs/reference/testing.md", "`pip install 'aioserve[testing]'`", "hypothesis"),
    ],
)
def test_a_page_that_does_not_install_what_it_needs_is_named_with_it(
    name: str, line: str, missing: str, reading: Readers, tmp_path: Path
) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert line in text
    page = tmp_path / "page.md"
    page.write_text(text.replace(line, ""), encoding="utf-8")
    found = [block for block in blocks(page) if block.language == "python" and not block.tag]
    with pytest.raises(AssertionError, match=rf"^page\.md:\d+ needs {missing}, and no `pip inst"):
        _ = find_packages(page, reading), reading.program(page, found)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("serve", 2, "aioserve serve needs starlette: pip install 'aioserve[server]'"),
        (
            "bench serve http://127.0.0.1:9",
            2,
            "aioserve bench serve needs aiohttp: pip install 'aioserve[bench]'",
        ),
        (
            "plugins check fcfs",
            1,
            "checks of plugins need hypothesis: pip install 'aioserve[testing]'",
        ),
    ],
)
def test_a_command_without_its_packages_says_what_to_install(
    words: str, code: int, said: str, reading: Readers, bare: Path
) -> None:
    done = reading.command(bare, 1, words.split())
    assert done == {"code": code, "out": "", "err": f"aioserve: {said}\n"}


def test_imports_without_their_packages_say_what_to_install(reading: Readers, bare: Path) -> None:
    said = r"aioserve\.server needs starlette: pip install 'aioserve\[server\]'"
    for text in ("import aioserve.server.settings", "from aioserve.server import create_app"):
        with pytest.raises(AssertionError, match=said):
            reading.program(bare, [Block(bare, 1, "python", "", text)])


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A page that installs nothing."""
    page = tmp_path / "page.md"
    page.write_text("\n", encoding="utf-8")
    return page


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
