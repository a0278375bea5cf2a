"""The house is in order: imports go down and never in a circle, and CONTRIBUTING.md shows it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house import (
    CLOSED,
    FOR_ALL,
    KNOWN_TO_ALL,
    OPENED,
    ORDER,
    PACKAGE,
    PAGES,
    PLUGINS,
    ROOT,
    files_with_a_place,
    import_graph,
    imported_names,
    imports_by_place,
    is_or_is_in,
    picture,
    plugin_violations,
    private_reads,
    shortest_circle,
    source_files,
    unreached,
    violations,
)


def test_no_module_imports_from_a_folder_above_it() -> None:
    found = []
    for place, path in files_with_a_place():
        assert place in ORDER, f"{path.relative_to(ROOT)}: {place} has no place in the order"
        found.extend(
            f"{path.relative_to(ROOT)}: {violation}"
            for violation in violations(place, path.read_text(encoding="utf-8"))
        )
    assert not found, "\n".join(found)


def test_no_imports_go_in_a_circle() -> None:
    sources = {name: path.read_text(encoding="utf-8") for name, path in source_files()}
    circle = shortest_circle(import_graph(sources))
    assert not circle, "imports go in a circle: " + " -> ".join(circle)


def test_no_module_reads_what_is_private_in_another() -> None:
    found, opened = [], {}
    for place, path in files_with_a_place():
        file = path.relative_to(ROOT).as_posix()
        for line, text in private_reads(path.read_text(encoding="utf-8")):
            if text in OPENED.get(file, ()):
                opened.setdefault(file, set()).add(text)
            elif place in CLOSED:
                found.append(f"{file}: line {line}: {text} is private")
    assert not found, "\n".join(found)
    assert opened == {file: set(texts) for file, texts in OPENED.items()}, "no longer needed"


def test_the_contributing_guide_shows_the_house_as_it_is() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)\n```$", guide, flags=re.DOTALL | re.MULTILINE)
    assert blocks == [picture(imports_by_place())], "`python -m tests.house` prints it"


def test_what_our_tests_alone_use_is_not_in_the_package() -> None:
    sources = {name: path.read_text(encoding="utf-8") for name, path in source_files()}
    unused = unreached(import_graph(sources), "aioserve.testing")
    assert not unused, (
        f"neither exported nor used by the package: tests/doubles/ has room for {unused}"
    )


@pytest.mark.parametrize("module", FOR_ALL[:-1])
def test_what_everybody_imports_imports_only_what_everybody_imports(module: str) -> None:
    path = ROOT / (module.replace(".", "/") + ".py")
    found = [
        name
        for _, name in imported_names(path.read_text(encoding="utf-8"))
        if is_or_is_in(name, "aioserve")
        and not any(is_or_is_in(name, m) for m in (*FOR_ALL, *KNOWN_TO_ALL))
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
        ("server", "from aioserve import Engine", "server must not know aioserve.Engine"),
        (
            "server",
            "from aioserve.engine.engine import Engine",
            "must not know aioserve.engine.engi",
        ),
        ("server", "from aioserve.engine.stream import TokenStream", "engine.stream.TokenStream"),
        ("plugins", "import asyncio", "plugins must not know asyncio"),
        ("cli", "import aioserve.scheduling.view", "cli must not know aioserve.scheduling.view"),
        ("kv", "from . import pages", "relative import ..pages"),
        ("traces", "from aioserve.scheduling import policy", "traces must not know aioserve.sched"),
        ("capacity", "from aioserve.traces import request", "capacity imports aioserve.traces"),
        *[("engine", f"import {module}", f"engine must not know {module}") for module in PAGES],
        (
            "engine",
            "from aioserve.paging import pages",
            "engine must not know aioserve.paging.pages",
        ),
        (
            "engine",
            "if 1:\n    from aioserve.kv.lease import KVLease",
            "must not know aioserve.kv.l",
        ),
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
        ("scheduling", "from aioserve.steps.plan import StepPlan"),
        ("scheduling", "from aioserve.kv.page_pool import PagePool"),
        ("execution", "from aioserve.paging.pages import token_locations"),
        ("kv", "from aioserve import _native\nfrom aioserve.errors import InvariantError"),
        ("ops", "import torch\nfrom aioserve.ops import types"),
        ("cli", "from aioserve import Engine"),
        ("text", "import torchless\nimport timeit"),
        (
            "server",
            "from aioserve.engine.interface import EngineLike\nfrom aioserve import Observer",
        ),
        ("engine", "from aioserve.kv.memory import KVMemory\nimport aioserve.kv.eviction"),
    ],
)
def test_an_import_from_below_is_fine(place: str, source: str) -> None:
    assert violations(place, source) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from aioserve.scheduling.policy import SchedulingPolicy", "aioserve.scheduling.policy"),
        ("import aioserve.paging.pages", "aioserve.paging.pages is not public"),
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


A, B, C = "house.a", "house.b", "house.c"


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({A: "import house.b", B: "import house.a"}, [A, B, A]),
        ({A: "from house import b", B: "from house.a import x"}, [A, B, A]),
        ({A: "def f():\n    import house.b", B: "from house.a import x"}, [A, B, A]),
        ({A: "if TYPE_CHECKING:\n    from house.b import X", B: "import house.a"}, [A, B, A]),
        ({A: "import house.b", B: "import house.c", C: "import house.a"}, [A, B, C, A]),
        ({A: "import house.b, house.c", B: "import house.c", C: "import house.b"}, [B, C, B]),
        ({"house": "from house.a import X", A: "from house import X"}, ["house", A, "house"]),
        ({A: "import house.a.x"}, [A, A]),
    ],
)
def test_a_circle_of_imports_is_found(sources: dict[str, str], circle: list[str]) -> None:
    assert shortest_circle(import_graph(sources)) == circle


@pytest.mark.parametrize(
    "sources",
    [
        {A: "import house.b, house.c", B: "import house.c", C: "import torch"},
        {"house": "from house.a import X\nfrom house.b import Y", A: "import house.b", B: ""},
        {"house": "from house.b import Y", B: "from house import a", A: "def house(): ..."},
    ],
)
def test_imports_without_a_circle_are_fine(sources: dict[str, str]) -> None:
    assert shortest_circle(import_graph(sources)) == []


def test_modules_that_only_each_other_import_are_unreached() -> None:
    graph = {
        "house": {"house.tools"},
        "house.cli": {"house.tools.lent"},
        "house.tools": {"house.tools.shown"},
        "house.tools.shown": {"house.tools.below"},
        "house.tools.below": set(),
        "house.tools.lent": set(),
        "house.tools.alone": {"house.tools.below", "house.tools.helper"},
        "house.tools.helper": set(),
    }
    assert unreached(graph, "house.tools") == ["house.tools.alone", "house.tools.helper"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def f(view):\n    return view._state", "view._state"),
        ("class A:\n    def f(self):\n        return self.pool._native", "self.pool._native"),
        ("class A:\n    def f(self, other):\n        other._count = 1", "other._count"),
        ("from aioserve.kv import memory\nmemory._limit()", "memory._limit"),
        ("from aioserve.kv.memory import _limit", "aioserve.kv.memory._limit"),
        ("run(sequence.lease)._pages", "run(sequence.lease)._pages"),
    ],
)
def test_a_private_name_of_another_module_is_found(source: str, text: str) -> None:
    assert [found for _, found in private_reads(source)] == [text]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        return self._x + super()._x + type(self).__name__",
        "class A:\n    @classmethod\n    def f(cls):\n        return cls._x",
        "class A:\n    _x = 1\n\nassert A._x",
        "from aioserve import _native\n_native.PagePool(1, 2)",
    ],
)
def test_private_names_of_its_own_are_fine_in_a_module(source: str) -> None:
    assert private_reads(source) == []


def test_the_picture_goes_from_top_to_bottom() -> None:
    shown = picture({"ops": set(), "engine": {"kv", "plugins"}, "kv": {"ops"}})
    assert shown.splitlines()[:4] == ["engine -> plugins, kv", "kv     -> ops", "ops", ""]


def test_the_kinds_of_drafters_are_told_apart_in_their_rooms_alone() -> None:
    """`isinstance` of a drafter elsewhere is a branch that each new drafter would have to find."""
    rooms = (PACKAGE / "drafting", PACKAGE / "execution" / "speculation")
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in PACKAGE.rglob("*.py")
        if not any(path.is_relative_to(room) for room in rooms)
        for call in drafter_checks(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def drafter_checks(source: str) -> list[ast.Call]:
    """Calls of `isinstance` with a class of drafters."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and any("Drafter" in ast.unparse(argument) for argument in node.args[1:])
    ]


def test_a_drafter_that_is_told_apart_is_found() -> None:
    (call,) = drafter_checks("x = 1\nif isinstance(made, (str, drafting.HeadDrafter)):\n    pass\n")
    assert call.lineno == 2
    assert not drafter_checks("isinstance(sequence, DraftedSequence)")
