"""Mini SGLang's requests at one token to a page: the figures, and the page of the docs that has the
story."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from aioserve.testing import run_simulated

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "from-the-books.md"


@pytest.fixture(scope="module")
def story() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("page_story")
        sys.modules.pop("page_story")


def test_the_first_request_leaves_31_pages(story: Any) -> None:
    first, *_ = run_simulated(story.tell)
    assert (first.found, first.computed) == (0, 16)
    assert [tokens for _, tokens, *_ in first.steps] == [16, *[1] * 15]
    held = [pages for *_, pages, _ in first.steps]
    assert held == list(range(16, 32)), "the last of 16 completion tokens is never computed"
    assert first.cached_pages == 31


def test_the_second_request_finds_15_tokens_and_computes_one(story: Any) -> None:
    _, second, _ = run_simulated(story.tell)
    assert (second.found, second.computed) == (15, 1)
    assert second.steps[0][1] == 1
    assert second.cached_pages == 31, "it leaves no second copy"


def test_twelve_of_sixteen_tokens_are_shared(story: Any) -> None:
    *_, third = run_simulated(story.tell)
    assert (third.found, third.computed) == (12, 4)
    assert third.cached_pages == 31 + 4 + 15


def test_the_docs_have_the_story_as_it_is_printed(
    story: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    story.main()
    assert capsys.readouterr().out.strip() in PAGE.read_text(encoding="utf-8")
