"""Table of a server's settings in docs/reference/server-settings.md, made of the structs.

    python -m tests.docs.settings_table

writes it anew, between its two marks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aioserve.cli._settings import Setting
from aioserve.cli.serve import SETTINGS

__all__ = ["PAGE", "parts_of", "table"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "server-settings.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"


def table() -> str:
    """Return the table of what [server] may hold."""
    rows = [row(setting) for setting in SETTINGS if setting.table == "server"]
    head = "| key of `[server]` | default | meaning |\n| --- | --- | --- |\n"
    return head + "".join(rows)


def row(setting: Setting) -> str:
    meaning = setting.help.replace("|", "\\|")
    return f"| `{setting.name}` | {shown(setting.default)} | {meaning} |\n"


def shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    if isinstance(default, tuple):
        return ", ".join(map(shown, default))
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def parts_of(text: str) -> tuple[str, str, str]:
    """Return the text before the table, the table, and the text behind it."""
    before, _, rest = text.partition(BEGIN)
    inside, _, behind = rest.partition(END)
    return before + BEGIN, inside, END + behind


if __name__ == "__main__":
    before, _, behind = parts_of(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + table() + behind, encoding="utf-8")
