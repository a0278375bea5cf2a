"""Does what a reader does with a page, in the environment of the page.

A process that is asked in lines of JSON by stdin, and answers so by stdout: `Readers` starts it. It
imports nothing that the environment may lack.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import site
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from aioserve import ConfigError
from aioserve.cli import main as run_aioserve
from aioserve.config import EngineConfig
from aioserve.engine import lifecycle
from aioserve.execution.devices import chosen_device
from tests.doubles.unmeasured import UnmeasuredScheduler

Answer = dict[str, Any]


def command(words: list[str], folder: str) -> Answer:
    """Run `aioserve` with these words in a folder."""
    code = "it didn't leave"
    with contextlib.chdir(folder), _captured() as (out, err):
        try:
            run_aioserve(words)
        except SystemExit as leaving:
            code = leaving.code
    return {"code": code, "out": _text(out), "err": _text(err)}


def program(name: str, blocks: list[dict[str, Any]]) -> Answer:
    """Run a page's python blocks in order and in one namespace, each with its packages. The answer
    is what each of them printed, by its line, and what stopped the last one."""
    printed: dict[str, str] = {}
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for block in blocks:
        for place in block["sites"]:
            if place not in sys.path:
                site.addsitedir(place)
        text = _on_this_machine(block["text"]) if block["tag"] == "gpu" else block["text"]
        with _captured() as (out, _):
            stopped = _stopped_by(text, block["line"], name, namespace)
        printed[block["line"]] = _text(out)
        if stopped:
            return {"stopped": stopped, "printed": printed}
    return {"stopped": None, "printed": printed}


def imports(path: str) -> Answer:
    """Run the import statements at the top of a program."""
    found = ast.parse(Path(path).read_text(encoding="utf-8")).body
    sys.path.insert(0, str(Path(path).parent))
    try:
        for node in found:
            if isinstance(node, ast.Import | ast.ImportFrom):
                text = ast.unparse(node)
                if stopped := _stopped_by(text, node.lineno - 1, path, {"__name__": "__docs__"}):
                    return {"stopped": stopped}
    finally:
        sys.path.pop(0)
    return {"stopped": None}


def script(name: str) -> Answer:
    """Look for a command that a package brings."""
    return {"is_there": bool(entry_points(group="console_scripts", name=name))}


def _stopped_by(text: str, line: int, name: str, namespace: dict[str, Any]) -> Answer | None:
    # Blank lines in front make a traceback show the page's own line numbers.
    source = "\n" * line + text
    unraisable: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(source, name, "exec", dont_inherit=True), namespace)
    except BaseException as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return {"missing": missing, "line": line + 1, "traceback": traceback.format_exc()}
    finally:
        sys.unraisablehook = hook
    if unraisable:
        return {"missing": None, "line": line + 1, "traceback": repr(unraisable)}
    return None


def _on_this_machine(text: str) -> str:
    """A block that names a GPU, or what it is without one."""
    try:
        chosen_device(EngineConfig(device="cuda"))
    except ConfigError:
        return text.replace('"cuda"', '"cpu"')
    return text


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()


if __name__ == "__main__":
    lifecycle.Scheduler = UnmeasuredScheduler  # as tests/conftest.py has it
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # whatever else is printed goes to stderr
        for asked in sys.stdin:
            name, arguments = json.loads(asked)
            do = {"command": command, "program": program, "imports": imports, "script": script}
            print(json.dumps(do[name](**arguments)), file=answers, flush=True)
