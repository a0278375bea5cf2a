"""Questions of a new user are answered within two links from the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.docs.test_links import ROOT, slugs

LINK: Final = re.compile(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)")
ANSWERS: Final[dict[str, tuple[str, str]]] = {
    "Where do I set the page size?": ("docs/reference/engine.md", "engine"),
    "Why one process?": ("docs/explanation/core-loop.md", "why-threads-and-not-a-server-process"),
    "How do I test my app?": ("docs/how-to/test-your-app.md", "test-your-app"),
    "How do I install it without a network?": ("docs/how-to/install.md", "without-a-network"),
    "Which models does it run?": ("docs/reference/supported.md", "supported-models-and-platforms"),
    "What is --gpu-memory-utilization here?": (
        "docs/how-to/come-from-other-engines.md",
        "from-vllm",
    ),
    "How do I get a pydantic object?": ("docs/how-to/use-pydantic.md", "get-pydantic-objects"),
    "How does a policy count what a tenant got?": (
        "docs/how-to/account-for-service.md",
        "account-for-service-in-a-policy",
    ),
    "Why is the first token late?": ("docs/how-to/troubleshoot.md", "it-is-slow"),
    "What does never mean in a table?": (
        "docs/reference/special-values.md",
        "printed-by-commands",
    ),
    "How do I stop other tenants from seeing my cache?": (
        "docs/how-to/share-prefixes.md",
        "keep-tenants-apart",
    ),
    "Which errors may be tried again?": ("docs/reference/errors.md", "whose-fault-it-is"),
}
"""The page and the heading that answer each question."""


def linked(page: Path) -> set[Path]:
    """Pages that a page links to."""
    found = LINK.findall(page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in found if "://" not in target}


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_is_two_links_from_the_readme(question: str) -> None:
    name, heading = ANSWERS[question]
    page = ROOT / name
    assert heading in slugs(page)
    near = linked(ROOT / "README.md")
    assert page in near or any(page in linked(other) for other in near)
