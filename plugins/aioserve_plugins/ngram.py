"""Prompt lookup: what followed the last tokens of a sequence at their previous occurrence."""

from __future__ import annotations

from aioserve import DrafterSpec, NgramDrafter, hookimpl

__all__ = ["aioserve_drafters"]


@hookimpl
def aioserve_drafters() -> list[DrafterSpec]:
    about = "prompt lookup: what followed the last tokens where they stood before"
    return [DrafterSpec("ngram", NgramDrafter, about, api=1)]
