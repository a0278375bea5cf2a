"""Heads that draft from hidden states of the model they were trained for."""

from __future__ import annotations

from aioserve import DrafterSpec, Eagle3Drafter, MedusaDrafter, MTPDrafter, hookimpl

__all__ = ["aioserve_drafters"]


@hookimpl
def aioserve_drafters() -> list[DrafterSpec]:
    return [
        DrafterSpec("eagle3", Eagle3Drafter, "an EAGLE-3 head of the model", api=1),
        DrafterSpec("mtp", MTPDrafter, "a head for multi-token prediction of the model", api=1),
        DrafterSpec("medusa", MedusaDrafter, "Medusa heads of the model", api=1),
    ]
