"""A smaller model that drafts for a larger one."""

from __future__ import annotations

from aioserve import DrafterSpec, ModelDrafter, hookimpl

__all__ = ["aioserve_drafters"]


@hookimpl
def aioserve_drafters() -> list[DrafterSpec]:
    about = "a smaller model with the same tokens, which draws by the same keys"
    return [DrafterSpec("model", ModelDrafter, about, api=1)]
