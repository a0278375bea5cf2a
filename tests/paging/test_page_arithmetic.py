"""Positions become pages in `aioserve.paging.pages` and nowhere else."""

from __future__ import annotations

import ast

import pytest

from tests.house import ROOT, files_with_a_place

PAGE_SIZES = ("page_size", "size")
PLACES = ("cli", "engine", "execution", "kv", "ops", "scheduling", "server", "simulation")
"""Places that divide by no page size. Kernels do, and test doubles."""

DIVISIONS = {
    "aioserve/paging/pages.py": None,
    # A call for each running sequence of each step would be a tenth of its planning.
    "aioserve/kv/memory.py": {"lease.entries % size"},
}


def divisions(source: str) -> list[str]:
    """Divisions by a page size: `//`, `%` and `divmod`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod):
            divisor = node.right
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "divmod":
            divisor = node.args[1]
        else:
            continue
        if ast.unparse(divisor).split(".")[-1] in PAGE_SIZES:
            found.append(ast.unparse(node))
    return found


def test_one_module_divides_by_page_sizes() -> None:
    found = {}
    for place, path in files_with_a_place():
        file = path.relative_to(ROOT).as_posix()
        allowed = DIVISIONS.get(file, set())
        if place in PLACES and allowed is not None:
            left = set(divisions(path.read_text(encoding="utf-8"))) - allowed
            if left:
                found[file] = left
    assert not found, "aioserve.paging.pages has a function for it"


@pytest.mark.parametrize(
    "source",
    ["n // page_size", "-(-n // self.page_size)", "n % memory.page_size", "divmod(n, size)"],
)
def test_a_division_by_a_page_size_is_found(source: str) -> None:
    assert len(divisions(source)) == 1


@pytest.mark.parametrize("source", ["size // 2", "n // 32", "page_size * n"])
def test_another_division_is_none(source: str) -> None:
    assert not divisions(source)
