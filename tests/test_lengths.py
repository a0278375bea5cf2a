"""Functions are short enough to be read at a glance: one idea each."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house import PACKAGE, PLUGINS

MOST_LINES = 60
"""Lines of the longest function body, its docstring aside."""

LONGER = {
    "capacity/capacity.py:capacity_of": "one table of figures",
    "engine/intake.py:submit": "checks in their order, a line each",
    "models/families/common.py:llama_like": "one table of a config's fields",
    "ops/gpu/attention_decode.py:decode": "launches of one kernel",
    "ops/gpu/attention_decode.py:decode_kernel": "a kernel",
    "ops/gpu/attention_prefill.py:prefill_kernel": "a kernel",
    "ops/gpu/grouped_kernels.py:tile_sums": "a kernel",
    "ops/gpu/inputs.py:pack": "one table of arrays",
    "ops/gpu/latent_attention.py:attention_kernel": "a kernel",
    "ops/gpu/rotary.py:rotary_kernel": "a kernel",
    "ops/gpu/sampling.py:draw": "launches of kernels in their order",
    "server/connections.py:_with_httptools": "two classes that need an optional library",
}
"""Functions that are longer, each with the reason."""


def bodies(source: str) -> Iterator[tuple[str, int]]:
    """Names of the functions in `source`, and how many lines their bodies have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) else node.body
            last = node.end_lineno or node.lineno
            yield node.name, last - body[0].lineno + 1 if body else 0


def test_no_function_is_long_without_a_reason() -> None:
    found = {
        f"{path.relative_to(root).as_posix()}:{name}"
        for root in (PACKAGE, PLUGINS)
        for path in root.rglob("*.py")
        for name, lines in bodies(path.read_text(encoding="utf-8"))
        if lines > MOST_LINES
    }
    assert found - LONGER.keys() == set()
    assert LONGER.keys() - found == set(), "no longer needed"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('def f(\n    a,\n    b,\n):\n    """Text\n\n    of lines."""\n    return a\n', 1),
        ("async def f():\n    a = 1\n\n    return a\n", 3),
        ('def f():\n    """Text."""\n', 0),
    ],
)
def test_signature_and_docstring_are_no_part_of_a_body(source: str, lines: int) -> None:
    assert list(bodies(source)) == [("f", lines)]
