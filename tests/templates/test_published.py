"""Published chat templates beside transformers' own renderer; `make test-templates` fetches them.

Each is rendered with conversations of every kind, some 80. Both print the same, but for this:

filled      the template fails without a field that may be left out, and prints it where ours, and
            theirs, are given it
continued   a last message that goes on stands escaped in the prompt, which theirs refuses
broken      the template prints no conversation with either: it needs variables of its own
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from aioserve.text.chat_template import ChatTemplate
from tests.text.beside_transformers import SPECIAL, assert_same, conversations, stop_the_clock

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PUBLISHED = sorted((_CACHE / "aioserve" / "templates").glob("*/*.jinja"))
NEED_VARIABLES = ("firefunction", "rerank")
"""Templates that need variables beside messages and tools."""

pytestmark = pytest.mark.published


def test_there_are_as_many_as_were_published() -> None:
    if not PUBLISHED:
        pytest.skip("there are no published templates: `make test-templates` downloads them")
    assert len(PUBLISHED) >= 150


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.name)
def test_a_published_template_prints_what_it_prints_in_transformers(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_the_clock(monkeypatch)
    source = file.read_text()
    ours = ChatTemplate(source, special_tokens=SPECIAL, origin=file.name)
    outcomes = Counter(assert_same(source, ours, given) for given in conversations())
    assert not outcomes["broken"] or any(word in file.name for word in NEED_VARIABLES)
