"""Readers of the documentation: processes in the environments that the pages make."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.cli.forked import Forks, forks
from tests.docs.environments import Environments
from tests.docs.pages import ROOT, Block, installs, relative

__all__ = ["Readers", "readers"]

Answer = dict[str, Any]
ADD_PACKAGES = {"PYTHONPATH", "PYTHONHOME"}
"""Variables that bring packages which no page has installed."""
IMPORTED = ("aioserve.engine", "aioserve.testing", "tests.doubles.unmeasured")


class Readers:
    """Has one process for each environment, which several pages may share. Projects that pages
    make are in `folder`, where their commands run."""

    def __init__(self, environments: Environments, forking: Forks, folder: Path) -> None:
        self.folder = folder
        self._environments = environments
        self._forking = forking
        self._processes: dict[tuple[Path, ...], _Process] = {}
        self._imported: set[tuple[str | Path, ...]] = set()

    def command(self, page: Path, line: int, words: Sequence[str]) -> Answer:
        """`aioserve` with words, as on that line of the page: exit code, stdout, stderr."""
        return self._at(page, line).ask("command", words=words, folder=str(self.folder))

    def program(self, page: Path, blocks: Sequence[Block]) -> dict[int, str]:
        """Prints of the python blocks of a page, by their lines. Raises `AssertionError` that says
        what stopped them."""
        steps = [self._sites(page, block.line) for block in blocks]
        asked = [
            {"line": one.line, "tag": one.tag, "text": one.text, "sites": list(map(str, sites))}
            for one, sites in zip(blocks, steps, strict=True)
        ]
        if not asked:
            return {}
        # One whose packages grow on the way is no reader of other pages.
        alone = steps[0] != steps[-1]
        process = self._began(steps[0]) if alone else self._of(steps[0])
        try:
            answer = process.ask("program", name=relative(page), blocks=asked)
        finally:
            if alone:
                process.end()
        self._check(page, answer["stopped"])
        return {int(line): text for line, text in answer["printed"].items()}

    def imports(self, page: Path, line: int, path: Path) -> None:
        """The imports of a program that the page names on that line. Raises `AssertionError` for
        a module that no package of the page brings, be it installed on this machine or not."""
        key = (*installs(page, line), path)
        if key in self._imported:
            return
        stopped = self._at(page, line).ask("imports", path=str(path))["stopped"]
        absent = self._environments.sites(installs(page, line), self.folder)[1]
        self._imported.add(key)
        if stopped and _normal(stopped["missing"] or "") not in absent:
            self._check(page, stopped | {"line": line})

    def has_script(self, page: Path, line: int, name: str) -> bool:
        """Return true if the packages that the page has installed above that line bring a command
        `name`."""
        return self._at(page, line).ask("script", name=name)["is_there"]

    def end(self) -> None:
        for process in self._processes.values():
            process.end()

    def _check(self, page: Path, stopped: Answer | None) -> None:
        if stopped is None:
            return
        place = f"{relative(page)}:{stopped['line']}"
        if missing := stopped["missing"]:
            place += f" needs {missing}, and no `pip install` above brings it"
        raise AssertionError(f"{place}\n{stopped['traceback']}")

    def _at(self, page: Path, line: int) -> _Process:
        return self._of(self._sites(page, line))

    def _sites(self, page: Path, line: int) -> tuple[Path, ...]:
        return tuple(self._environments.sites(installs(page, line), self.folder)[0])

    def _of(self, sites: tuple[Path, ...]) -> _Process:
        if (process := self._processes.get(sites)) is None or process.has_ended:
            process = self._processes[sites] = self._began(sites)
        return process

    def _began(self, sites: tuple[Path, ...]) -> _Process:
        return _Process(self._forking, sites)


class _Process:
    """Answers one question after the other."""

    def __init__(self, forking: Forks, sites: Sequence[Path]) -> None:
        theirs, asking = os.pipe()
        answering, its = os.pipe()
        self._child = forking.begin(
            (),
            (theirs, its, 2),
            environment=os.environ | {"COLUMNS": "80"},
            program="tests.docs.in_environment",
            sites=sites,
        )
        os.close(theirs)
        os.close(its)
        self._asking, self._answering = os.fdopen(asking, "w"), os.fdopen(answering)
        self.has_ended = False

    def ask(self, what: str, **arguments: Any) -> Answer:
        try:
            print(json.dumps([what, arguments]), file=self._asking, flush=True)
            return json.loads(self._answering.readline())
        except BaseException:  # a time limit among them: the answer would come to the next one
            self.end()
            raise

    def end(self) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self._child.kill()
        for one in (self._asking, self._answering):
            one.close()


def _normal(module: str) -> str:
    return module.partition(".")[0].replace("_", "-").lower()


@contextlib.contextmanager
def readers(folder: Path) -> Iterator[Readers]:
    """Readers for a while, with README.md in their folder, as where commands are typed."""
    here = folder / "here"
    here.mkdir()
    (here / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8"))
    environments = Environments(folder)
    environment = {name: os.environ[name] for name in os.environ.keys() - ADD_PACKAGES}
    with forks(folder, environments.python, IMPORTED, environment) as forking:
        reading = Readers(environments, forking, here)
        try:
            yield reading
        finally:
            reading.end()
