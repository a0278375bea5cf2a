"""The order of the house: data flows downwards, and a folder imports only from folders below it.

    python -m tests.house

prints the folders and what each imports. Everything here is read from source text, imports inside
functions and under `TYPE_CHECKING` included; nothing is imported. `test_house.py` holds the order.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "aioserve"
PLUGINS = ROOT / "plugins" / "aioserve_plugins"

ORDER = (
    "cli",
    "server",
    "testing",
    "simulation",
    "traces",
    "engine",
    "plugins",
    "scheduling",
    "kv",
    "execution",
    "steps",
    "sampling",
    "drafting",
    "capacity",
    "models",
    "ops",
    "formats",
    "paging",
    "grammars",
    "text",
    "assets",
    "other_engines",
)
"""Places of the package, highest first."""

FOR_ALL = (
    "aioserve.arguments",
    "aioserve.errors",
    "aioserve.config",
    "aioserve.request",
    "aioserve.sampling_params",
    "aioserve.timings",
    "aioserve.structured_output",
    "aioserve.schema_classes",
    "aioserve.isolation",
    "aioserve.hints",
    "aioserve.json_file",
    "aioserve.progress_bar",
    "aioserve.unsupported",
    "aioserve._native",
)
"""Modules at the top of the package, which every place may import. The last is compiled."""

KNOWN_TO_ALL = ("aioserve.other_engines", "aioserve.drafting.drafter")
"""All that those modules may import beside each other: names of other engines, and the contract of
drafters, which requests name."""

TENSORS = ("torch", "cupy", "triton")
CLOCKS_AND_IO = ("asyncio", "anyio", "time", "datetime", "threading", "socket", "random", "secrets")
SERVING = ("aioserve.engine", "aioserve.plugins", "aioserve.scheduling", "aioserve.execution")
PAGES = (
    "aioserve.kv.claims",
    "aioserve.kv.groups",
    "aioserve.kv.lease",
    "aioserve.kv.page_pool",
    "aioserve.kv.page_table",
    "aioserve.kv.prefix_tree",
    "aioserve.kv.tiers",
    "aioserve.paging.pages",
)
ENGINES = (
    *("aioserve.Engine", "aioserve.LLM", "aioserve.TokenStream", "aioserve.ChatStream"),
    *("aioserve.engine.engine", "aioserve.engine.facts", "aioserve.engine.lifecycle"),
    *("aioserve.engine.llm", "aioserve.engine.mailbox"),
    *("aioserve.engine.stream.TokenStream", "aioserve.engine.chat_stream.ChatStream"),
)
"""One implementation of `EngineLike`, and its streams."""
FORBIDDEN = {
    "cli": ("aioserve.scheduling",),
    "scheduling": TENSORS + CLOCKS_AND_IO,
    "kv": TENSORS + CLOCKS_AND_IO,
    "steps": TENSORS + CLOCKS_AND_IO,
    "simulation": (*TENSORS, "asyncio", "anyio"),
    "traces": (*TENSORS, "asyncio", "anyio", *SERVING, "aioserve.capacity"),
    "capacity": (*TENSORS, "asyncio", "anyio", *SERVING),
    "engine": TENSORS + PAGES,
    "plugins": (*TENSORS, "asyncio", "anyio"),
    "server": TENSORS + ENGINES,
    "grammars": (*TENSORS, "asyncio", "anyio"),
    "text": TENSORS,
    "paging": TENSORS + CLOCKS_AND_IO,
}
"""Modules that a place must not import, neither at the top nor inside a function."""

CLOSED = ("engine", "execution", "kv", "scheduling", "steps")
"""Places whose modules leave the private attributes of each other's objects alone."""

OPENED = {
    "aioserve/engine/lifecycle.py": ("task._log_destroy_pending",),
    "aioserve/kv/prefix_tree.py": ("pool._native",),
}
"""Private attributes that they read all the same, with reasons.

The native tree is made of native pools, and `PagePool` is the Python side of one. The object behind
it is of no use in its public face. Only `_log_destroy_pending` stops asyncio's warning that a task
was destroyed.
"""


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
    """Return the imports of a module in `place` that break the order, one line each."""
    found = []
    for line, name in imported_names(source):
        if name.startswith("."):
            found.append(f"line {line}: relative import {name}")
        elif any(is_or_is_in(name, module) for module in FORBIDDEN.get(place, ())):
            found.append(f"line {line}: {place} must not know {name}")
        elif is_or_is_in(name, "aioserve_plugins"):
            found.append(f"line {line}: {name} is found through its entry point, not imported")
        elif is_or_is_in(name, "aioserve") and not any(
            is_or_is_in(name, module) for module in FOR_ALL
        ):
            other = place_of(name)
            if other not in ORDER:
                found.append(f"line {line}: {name} has no place in the order")
            elif ORDER.index(other) < ORDER.index(place):
                found.append(f"line {line}: {place} imports {name} from above")
    return found


def plugin_violations(source: str) -> list[str]:
    """Return the imports of a bundled policy beyond the public names of `aioserve`."""
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


def source_files() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of each module of the package, the compiled one's stub included."""
    for path in sorted(PACKAGE.rglob("*.py*")):
        if path.suffix in {".py", ".pyi"}:
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def files_with_a_place() -> Iterator[tuple[str, Path]]:
    """Place and file of each module that isn't one of the few at the top of the package."""
    for _, path in source_files():
        first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if path.parent != PACKAGE or first in ORDER:
            yield first, path


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, among `sources`, name to text.

    `from a.b import c` names `a.b.c` if that is a module, and `a.b` otherwise. `import a.b.c`
    doesn't count as an import of `a` and `a.b`, though Python runs their `__init__`. A package
    exports names of its modules, so every package would be a circle.
    """
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for _, name in imported_names(source):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            if name:
                graph[module].add(name)
    return graph


def shortest_circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """The modules of a circle, the first one again at the end; empty if there is none."""
    circles = [circle for start in sorted(graph) if (circle := _way_back(graph, start))]
    return min(circles, key=len, default=[])


def _way_back(graph: Mapping[str, Set[str]], start: str) -> list[str]:
    came_from: dict[str, str] = {}
    queue = deque([start])
    while queue:
        module = queue.popleft()
        for other in sorted(graph[module]):
            if other == start:
                way = [start, module]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1] if module != start else way
            if other not in came_from:
                came_from[other] = module
                queue.append(other)
    return []


def unreached(graph: Mapping[str, Set[str]], package: str) -> list[str]:
    """Modules in `package` that neither it nor any module outside of it comes to by imports."""
    inside = {module for module in graph if module.startswith(package + ".")}
    reached: set[str] = set()
    queue = deque(graph.keys() - inside)
    while queue:
        module = queue.popleft()
        if module not in reached:
            reached.add(module)
            queue.extend(graph[module])
    return sorted(inside - reached)


def private_reads(source: str) -> list[tuple[int, str]]:
    """Return line and text of each use of a private name of another object or module.

    `other._name` counts, unless `other` is `self`, `cls`, `super()` or a class of this module.
    `from module import _name` counts too.
    """
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    own |= {"self", "cls", "super()"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if _is_private(node.attr) and ast.unparse(node.value) not in own:
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [
                (node.lineno, name)
                for name in names
                if _is_private(name.rpartition(".")[2]) and name not in FOR_ALL
            ]
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports_by_place() -> dict[str, set[str]]:
    """Return, for each place, the other places that it imports from."""
    found: dict[str, set[str]] = {}
    for place, path in files_with_a_place():
        imported = found.setdefault(place, set())
        for _, name in imported_names(path.read_text(encoding="utf-8")):
            if is_or_is_in(name, "aioserve") and not any(
                is_or_is_in(name, module) for module in FOR_ALL
            ):
                imported.add(place_of(name))
        imported.discard(place)
    return found


def picture(imports: Mapping[str, Set[str]]) -> str:
    """The places from top to bottom, one in each line, and after an arrow those it imports from,
    in the same order."""
    width = max(map(len, imports))
    lines = [
        f"{place:{width}} -> {', '.join(sorted(imports[place], key=ORDER.index))}"
        if imports[place]
        else place
        for place in sorted(imports, key=ORDER.index)
    ]
    for_all = [name.removeprefix("aioserve.") for name in FOR_ALL]
    return "\n".join([*lines, "", f"left out, as all may import them: {', '.join(for_all)}"])


if __name__ == "__main__":
    print(picture(imports_by_place()))
