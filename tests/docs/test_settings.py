"""The pages tell of every setting of a server, and of every verb and flag of the command."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from aioserve.cli import app
from aioserve.cli._settings import OTHER_VARIABLES
from aioserve.cli.serve import SETTINGS, serve
from tests.docs.settings_table import PAGE, parts_of, table

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def test_the_table_of_settings_is_what_the_structs_say() -> None:
    found = parts_of(PAGE.read_text(encoding="utf-8"))[1]
    assert found == table(), "write it anew: python -m tests.docs.settings_table"


def test_every_verb_has_a_section() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("cli*.md"))
    sections = re.findall(r"^## `aioserve (\w+)", text, flags=re.MULTILINE)
    verbs = {name for name in app if not name.startswith("-")}
    assert verbs == set(sections)


def test_what_serve_takes_beside_settings_has_a_row() -> None:
    text = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    section = text.split("\n## `aioserve serve", 1)[1].split("\n## ", 1)[0]
    rows = {flag for line in section.splitlines() for flag in re.findall(r"^\| `(--[\w-]+)", line)}
    names = set(inspect.signature(serve).parameters) - {"model", *(one.name for one in SETTINGS)}
    assert {"--" + name.replace("_", "-") for name in names} <= rows


def test_variables_of_other_purposes_have_a_row() -> None:
    text = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    of_tests = {"FUZZ", "GPU_TESTS", "SANITIZE", "SANITIZED"}
    for variable in OTHER_VARIABLES - {f"AIOSERVE_{name}" for name in of_tests}:
        assert f"| `{variable}` |" in text
