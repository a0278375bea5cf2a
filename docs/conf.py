"""Sphinx settings. The pages are plain Markdown that reads as well without Sphinx."""

from __future__ import annotations

from importlib.metadata import version as version_of

from pygments.lexers import TextLexer
from sphinx.application import Sphinx

project = "aioserve"
version = release = version_of("aioserve")
extensions = ["myst_parser"]
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing"]  # links to the sources; tests/docs checks every link
html_theme = "furo"
html_title = "aioserve"
html_copy_source = False

NAVIGATION = """

```{toctree}
:hidden:
:glob:
tutorial/*
how-to/*
reference/*
explanation/*
benchmarks/*
guarantees*
```
"""


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the built index a sidebar; in the file it would show as a stray code block."""
    if name == "index":
        source[0] += NAVIGATION


def setup(app: Sphinx) -> None:
    app.add_lexer("mermaid", TextLexer)  # drawn on code hosts, shown as text here
    app.connect("source-read", add_navigation)
