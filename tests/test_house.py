"""The order of the house: data flows downwards, and a folder imports only from folders below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "aioserve"
PLUGINS = ROOT / "plugins" / "aioserve_plugins"

ORDER = (
    "cli",
    "server",
    "testing",
    "simulation",
    "traces",
    "capacity",
    "engine",
    "plugins",
    "scheduling",
    "kv",
    "execution",
    "sampling",
    "models",
    "ops",
    "text",
    "assets",
)
"""Places of the package, highest first."""

FOR_ALL = (
    "aioserve.errors",
    "aioserve.config",
    "aioserve.request",
    "aioserve.isolation",
    "aioserve._native",
)
"""Modules that every place may import. The last is compiled."""

ARITHMETIC = "aioserve.kv.pages"
"""The one place for page arithmetic: it imports nothing of the package, so all may import it."""

TENSORS = ("torch", "cupy", "triton")
CLOCKS_AND_IO = ("asyncio", "anyio", "time", "datetime", "threading", "socket", "random", "secrets")
SERVING = ("aioserve.engine", "aioserve.plugins", "aioserve.scheduling", "aioserve.execution")
FORBIDDEN = {
    "scheduling": TENSORS + CLOCKS_AND_IO,
    "kv": TENSORS + CLOCKS_AND_IO,
    "simulation": (*TENSORS, "asyncio", "anyio"),
    "traces": (*TENSORS, "asyncio", "anyio", *SERVING, "aioserve.capacity"),
    "capacity": (*TENSORS, "asyncio", "anyio", *SERVING),
    "engine": TENSORS,
    "server": TENSORS,
    "text": TENSORS,
}
"""What a place must not know, whether imported at the top or inside a function."""


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}"


def is_or_is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def place_of(name: str) -> str:
    """The place that a dotted name of the package belongs to.

    `aioserve.Engine` and the other public names stand for the engine, the highest of what they
    come from.
    """
    _, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    if first in ORDER:
        return first
    return "engine" if not first.islower() or first in {"hookimpl", ""} else first


def violations(place: str, source: str) -> list[str]:
    """What a module in `place` imports against the order, one line each."""
    found = []
    for line, name in imported_names(source):
        if name.startswith("."):
            found.append(f"line {line}: relative import {name}")
        elif any(is_or_is_in(name, module) for module in FORBIDDEN.get(place, ())):
            found.append(f"line {line}: {place} must not know {name}")
        elif is_or_is_in(name, "aioserve_plugins"):
            found.append(f"line {line}: {name} is found through its entry point, not imported")
        elif is_or_is_in(name, "aioserve") and not any(
            is_or_is_in(name, module) for module in (*FOR_ALL, ARITHMETIC)
        ):
            other = place_of(name)
            if other not in ORDER:
                found.append(f"line {line}: {name} has no place in the order")
            elif ORDER.index(other) < ORDER.index(place):
                found.append(f"line {line}: {place} imports {name} from above")
    return found


def plugin_violations(source: str) -> list[str]:
    """What a bundled policy imports beyond the public names of `aioserve`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = {node.module or "": [alias.name for alias in node.names]}
        elif isinstance(node, ast.Import):
            names = {alias.name: [] for alias in node.names}
        else:
            continue
        for module, members in names.items():
            if is_or_is_in(module, "aioserve") and module != "aioserve":
                found.append(f"line {node.lineno}: {module} is not public")
            found.extend(
                f"line {node.lineno}: aioserve.{member} is not public"
                for member in members
                if module == "aioserve" and member.startswith("_")
            )
            if module.partition(".")[0] in TENSORS + CLOCKS_AND_IO:
                found.append(f"line {node.lineno}: a policy must not know {module}")
    return found


def modules_of_the_package() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE or path.stem in ORDER
    ]


def test_no_module_imports_from_a_folder_above_it() -> None:
    found = []
    for path in modules_of_the_package():
        place = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert place in ORDER, f"{path.relative_to(ROOT)}: {place} has no place in the order"
        found.extend(
            f"{path.relative_to(ROOT)}: {violation}"
            for violation in violations(place, path.read_text(encoding="utf-8"))
        )
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", [*FOR_ALL[:-1], ARITHMETIC])
def test_what_everybody_imports_imports_only_what_everybody_imports(module: str) -> None:
    path = ROOT / (module.replace(".", "/") + ".py")
    found = [
        name
        for _, name in imported_names(path.read_text(encoding="utf-8"))
        if is_or_is_in(name, "aioserve") and not any(is_or_is_in(name, m) for m in FOR_ALL)
    ]
    assert not found


def test_bundled_policies_use_only_public_names() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {violation}"
        for path in sorted(PLUGINS.rglob("*.py"))
        for violation in plugin_violations(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("place", "source", "message"),
    [
        ("kv", "from aioserve.scheduling import policy", "kv imports aioserve.scheduling.policy"),
        ("kv", "from aioserve import scheduling", "kv imports aioserve.scheduling from above"),
        ("kv", "import aioserve.engine.engine", "kv imports aioserve.engine.engine from above"),
        ("kv", "from aioserve import Engine", "kv imports aioserve.Engine from above"),
        ("ops", "def f():\n    from aioserve.models import config", "line 2: ops imports"),
        ("execution", "from aioserve.kv.page_pool import PagePool", "from above"),
        ("engine", "if TYPE_CHECKING:\n    import aioserve.cli", "engine imports aioserve.cli"),
        ("scheduling", "import torch", "scheduling must not know torch"),
        ("scheduling", "import time", "scheduling must not know time"),
        ("kv", "def f():\n    import asyncio", "kv must not know asyncio"),
        ("kv", "from torch.nn import functional", "kv must not know torch.nn.functional"),
        ("text", "import torch", "text must not know torch"),
        ("kv", "from . import pages", "relative import ..pages"),
        ("traces", "from aioserve.scheduling import policy", "traces must not know aioserve.sched"),
        ("capacity", "from aioserve.traces import request", "capacity imports aioserve.traces"),
        ("scheduling", "import aioserve_plugins.fcfs", "found through its entry point"),
        ("cli", "from aioserve.attic import things", "has no place in the order"),
    ],
)
def test_an_import_against_the_order_is_found(place: str, source: str, message: str) -> None:
    (violation,) = violations(place, source)
    assert message in violation


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("scheduling", "from aioserve.execution.plan import StepPlan"),
        ("scheduling", "from aioserve.kv.page_pool import PagePool"),
        ("execution", "from aioserve.kv.pages import token_locations"),
        ("kv", "from aioserve import _native\nfrom aioserve.errors import InvariantError"),
        ("ops", "import torch\nfrom aioserve.ops import types"),
        ("cli", "from aioserve import Engine"),
        ("text", "import torchless\nimport timeit"),
    ],
)
def test_an_import_from_below_is_fine(place: str, source: str) -> None:
    assert violations(place, source) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from aioserve.scheduling.policy import SchedulingPolicy", "aioserve.scheduling.policy"),
        ("import aioserve.kv.pages", "aioserve.kv.pages is not public"),
        ("def f():\n    from aioserve import _native", "aioserve._native is not public"),
        ("import time", "must not know time"),
    ],
)
def test_a_private_name_in_a_policy_is_found(source: str, message: str) -> None:
    (violation,) = plugin_violations(source)
    assert message in violation


def test_public_names_are_fine_in_a_policy() -> None:
    source = "from aioserve import SchedulingPolicy, hookimpl\nimport aioserve\nimport math"
    assert plugin_violations(source) == []
