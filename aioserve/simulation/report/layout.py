"""Layout of the pages of a report: one file, nothing fetched, and no script but its own.

Templates, style and script are in `parts/`. A page's policy allows the style and the script whose
hashes it names, so what came into a page by mistake wouldn't run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from minijinja import Environment

from aioserve.simulation.report.downloads import csv_link
from aioserve.simulation.report.looks import look_of, symbols

__all__ = ["legend_of", "rendered"]

PARTS = Path(__file__).with_name("parts")


def rendered(template: str, **values: Any) -> str:
    """Render a page from a template of `parts/` and what it names. All text of `values` is
    escaped."""
    style, script = _part("report.css"), _part("report.js")
    templates = {path.name: _part(path.name) for path in sorted(PARTS.glob("*.html"))}
    environment = Environment(templates=templates, filters={"csv_link": csv_link})
    return environment.render_template(
        template,
        version=metadata.version("aioserve"),
        symbols=symbols(),
        style=style,
        script=script,
        style_hash=_hash_of(style),
        script_hash=_hash_of(script),
        **values,
    )


def legend_of(names: Sequence[str]) -> list[dict[str, str]]:
    """Legend for the templates: how each policy is drawn."""
    looks = [look_of(index) for index in range(len(names))]
    return [
        {"name": name, "css": look.css, "dashes": look.dashes, "mark": look.mark}
        for name, look in zip(names, looks, strict=True)
    ]


@cache
def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _hash_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
