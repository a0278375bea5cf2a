"""The page for readers of the books has each of their names and claims, and our figures as they are
measured."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "from-the-books.md"
TEXT = PAGE.read_text(encoding="utf-8")
BOOKS = ('"Nano-Serving"', '"LLM Serving from Scratch', '"Mini SGLang (Part 1)"')
NAMES = (
    *("Request", "RequestPool", "cached_len", "device_len", "extend_len", "Batch", "out_loc"),
    *("kv_indices", "ChunkedRequest", "PrefillManager", "DecodeManager", "ContinuousBatcher"),
    *("ModelExecutor", "RadixCacheManager", "match_req", "ref_count", "block table"),
    *("prefill_budget", "max_running_req", "num_kv_pages", "cuda_graph_max_bs"),
    *("kv_cache_pages", "max_batch_size", "max_chunk_size", "GraphRunner", "AttnBackend"),
    *("FrontendManager", "tokenizer process", "scheduler process", "ZMQ", "selective batching"),
    *("prefill bubble", "stall-free", "SplitFuse", "block-hash caching", "Flash-Decoding"),
    *("convoy", "goodput"),
)
"""Names of the books."""
CLAIMED = (
    *(
        "32 times fewer steps",
        "61.5 %",
        "17 times less",
        "786.4 MB",
        "46.1 MB",
        "1.0, 1.67 and 4.0",
    ),
    *("23 times", "10 to 1,000 times", "19,032 tokens", "3.25 times", "1.56 times", "8.3 times"),
    *("6.7 times", "13 times", "3 to 5 %", "5.6 times", "2 to 4 times", "over 96 %", "55 %"),
    *("91 %", "73 %", "45 %", "5 times the speed on agents", "5 times the speed on structured"),
    *("2.3 times", "2 to 6.5 times", "1,850 tokens", "14 nodes", "analyze_optimization_impact"),
    *("twenty requests of 4,000 tokens", "a cascade", "prefill apart from decode", "62.5 %"),
)
"""Figures and words of their claims."""
CORRECT = {
    "memory-formula": ("402.7 MB", "23.6 MB"),
    "seven-requests": ("1,750",),
    "trie-nodes": ("12 nodes", "6 in our prefix tree"),
    "impact-steps": ("3,840", "480", "672", "336", "134"),
    "twenty-requests": ("25.0 GiB", "141 GB"),
    "example-hits": ("10 of 24", "41.7%"),
    "paged-capacity": ("18.9 GB", "85%"),
}
"""Errors of the texts, with what their own arithmetic says."""
SLOW = {"workload-hits", "continuous-23x", "paging-2-to-4x", "sarathi-5.6x", "fastgen-2.3x"}
SLOW |= {"steps-32x", "hits-61.5", "memory-17x", "chunk-cost", "naive", "short-waits"}
"""Claims that take seconds."""
COLUMNS = ("name", "book", "claim", "condition", "here", "verdict", "why")
VERDICTS = {
    *("holds", "holds in part", "does not hold", "corrected"),
    *("can't be measured here", "not built yet"),
}


@pytest.fixture(scope="module")
def books() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.syspath_prepend(ROOT / "examples" / "policies")
        yield importlib.import_module("books")


def rows() -> dict[str, dict[str, str]]:
    """Rows of the page's table of claims, by name."""
    table = TEXT[TEXT.index("| name | book | claim |") :].split("\n\n")[0]
    cells = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in table.splitlines()[2:]]
    return {one[0].strip("`"): dict(zip(COLUMNS, one, strict=True)) for one in cells}


def declared() -> dict[str, bool]:
    """Names of all claims, and whether their figures vary, read from the source."""
    found: dict[str, bool] = {}
    for name in ("book_arithmetic", "book_schedules", "book_engines"):
        tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Claim":
                varies = any(keyword.arg == "varies" for keyword in node.keywords)
                found[ast.literal_eval(node.args[0])] = varies
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_the_books_stands_beside_ours(name: str) -> None:
    row = rf"^\| [^|]*(?<![\w-]){re.escape(name)}(?![\w-])[^|]*\| [^|]+ \| [^|]+ \|$"
    assert re.search(row, TEXT, flags=re.MULTILINE), name


@pytest.mark.parametrize("words", [*BOOKS, *CLAIMED])
def test_each_claim_of_the_books_stands_on_the_page(words: str) -> None:
    assert words in TEXT


def test_the_page_has_a_row_for_each_claim_and_no_empty_cell() -> None:
    found = rows()
    assert list(found) == list(declared())
    for name, row in found.items():
        assert all(row.values()), name
        assert row["verdict"] in VERDICTS, name
    varying = {name for name, varies in declared().items() if varies}
    said = TEXT[TEXT.index("The rows of `") :].split(" vary by machine")[0]
    assert set(re.findall(r"`([\w.-]+)`", said)) == varying


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.more] if name in SLOW else [])
        for name, varies in declared().items()
        if not varies
    ],
)
def test_the_row_of_the_page_is_what_the_command_prints(
    name: str, books: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    books.main([name])
    *_, line = capsys.readouterr().out.splitlines()
    assert line in TEXT.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, varies in declared().items() if varies])
def test_a_row_that_varies_says_all_else_as_the_command_does(
    name: str, books: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    books.main([name])
    *_, line = capsys.readouterr().out.splitlines()
    printed = dict(zip(COLUMNS, [cell.strip() for cell in line[1:-1].split(" | ")], strict=True))
    for column in ("claim", "condition", "why"):
        assert printed[column] == rows()[name][column]


@pytest.mark.parametrize(("name", "figures"), CORRECT.items())
def test_errors_of_the_texts_are_corrected_by_name(name: str, figures: tuple[str, ...]) -> None:
    row = rows()[name]
    assert row["verdict"] == "corrected"
    for figure in figures:
        assert figure in row["here"]


def test_what_is_not_built_names_later_work() -> None:
    unbuilt = [row for row in rows().values() if row["verdict"] == "not built yet"]
    assert [row["name"] for row in unbuilt] == ["`cascade`", "`disaggregation`"]
    assert all("Later work" in row["why"] for row in unbuilt)


def test_each_mistake_of_the_page_has_its_test() -> None:
    table = TEXT[TEXT.index("| printed | what goes wrong | our test |") :].split("\n\n")[0]
    named = re.findall(r"`(test_\w+)` \|$", table, flags=re.MULTILINE)
    source = (ROOT / "tests" / "books" / "test_printed_mistakes.py").read_text(encoding="utf-8")
    assert named == re.findall(r"^def (test_\w+)", source, flags=re.MULTILINE)
    assert len(named) == 5


def test_an_unknown_claim_is_refused_with_all_names(
    books: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        books.main(["memory-formul"])
    assert "memory-formula" in capsys.readouterr().err
