"""Data is never run as code: there is no pickle, eval, YAML or executable checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house import PACKAGE, PLUGINS, ROOT

MODULES = frozenset({"cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
BUILTINS = frozenset({"eval", "exec", "compile"})
METHODS = frozenset({"extractall", "read_pickle", "unsafe_load"})
SOURCES = sorted(
    path
    for folder in (PACKAGE, PLUGINS, ROOT / "tools", ROOT / "examples", ROOT / "benchmarks")
    for path in folder.rglob("*.py")
)


def unsafe(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            if isinstance(node, ast.Call) and (what := _unsafe_call(node)) is not None:
                yield f"line {node.lineno}: {what}"
            continue
        for name in names:
            if name.split(".")[0] in MODULES:
                yield f"line {node.lineno}: import {name}"


def _unsafe_call(call: ast.Call) -> str | None:
    given = {each.arg: each.value for each in call.keywords}
    if isinstance(call.func, ast.Name):
        return call.func.id if call.func.id in BUILTINS else None
    if not isinstance(call.func, ast.Attribute):
        return None
    name, of = call.func.attr, ast.unparse(call.func.value)
    if name in METHODS or (of, name) in {("os", "system"), ("os", "popen")}:
        return f"{of}.{name}"
    if (of, name) in {("torch", "load"), ("np", "load"), ("numpy", "load")}:
        wanted = "weights_only" if of == "torch" else "allow_pickle"
        safe = given.get(wanted)
        if wanted == "allow_pickle" and safe is None:
            return None  # numpy's default
        if isinstance(safe, ast.Constant) and safe.value is (of == "torch"):
            return None
        return f"{of}.load without a safe {wanted}"
    if of == "yaml" and name in {"load", "load_all", "full_load"}:
        return f"yaml.{name}"
    shell = given.get("shell")
    if isinstance(shell, ast.Constant) and shell.value:
        return f"{of}.{name} with a shell"
    return None


def test_no_data_becomes_code() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {what}"
        for path in SOURCES
        for what in unsafe(path.read_text(encoding="utf-8"))
    ]
    assert len(SOURCES) > 100
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "def f():\n    import marshal",
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "archive.extractall(path)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_what_makes_code_of_data_is_found(source: str) -> None:
    assert len(list(unsafe(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "re.compile(text)",
        "yaml.safe_load(text)",
        "model.eval()",
        "subprocess.run([text])",
    ],
)
def test_what_reads_data_as_data_is_fine(source: str) -> None:
    assert list(unsafe(source)) == []
