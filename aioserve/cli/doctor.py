"""`aioserve doctor [MODEL]`: what was found on this machine. What is missing is no error, but for
the model that is named."""

from __future__ import annotations

import json as json_module
from typing import Any

from aioserve.cli._interrupts import leaving_at_once

__all__ = ["doctor"]


def doctor(model: str | None = None, /, *, json: bool = False) -> None:
    """Show what was found: instruction sets, threads, torch, packages for GPUs, policies, models.

    Args:
        model: Show whether this model can be run, too: a model directory, an embedded model, or a
            hub id in the local cache.
        json: Print JSON instead of a table.
    """
    from aioserve.cli._machine import everything, facts_of_model

    with leaving_at_once():
        sections = {} if model is None else {"model asked for": facts_of_model(model)}
        sections = everything() | sections
    if json:
        print(json_module.dumps(sections, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for section, facts in sections.items():
        for index, (name, value) in enumerate(facts.items()):
            table.add_row("" if index else section, name.replace("_", " "), _shown(value))
    # Facts are data: brackets in them are no markup.
    Console(markup=False).print(table)


def _shown(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} ({inner})" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
