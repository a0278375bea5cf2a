"""Suffix decoding: what mostly follows the last tokens, in a sequence and in recent completions."""

from __future__ import annotations

from aioserve import DrafterSpec, SuffixDrafter, hookimpl

__all__ = ["aioserve_drafters"]


@hookimpl
def aioserve_drafters() -> list[DrafterSpec]:
    about = "suffix trees: what mostly follows, in the sequence and in recent answers"
    return [DrafterSpec("suffix", SuffixDrafter, about, api=1)]
