"""The one list of features that aioserve doesn't support yet.

docs/reference/supported.md shows it. Commands quote it to refuse an option of another server.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ADAPTERS", "DEVICES", "MACHINES", "MEDIA", "NOT_THERE", "STATE", "not_there"]

ADAPTERS: Final = "LoRA adapters"
DEVICES: Final = "several GPUs"
MACHINES: Final = "several machines"
STATE: Final = "recurrent state"
MEDIA: Final = "images and sound"

NOT_THERE: Final[dict[str, tuple[str, ...]]] = {
    "models": ("other mixtures", STATE, "encoders", MEDIA),
    "weights": ("NVFP4", ADAPTERS),
    "where": (DEVICES, MACHINES, "Windows", "macOS"),
    "computing": ("branches of draft tokens on GPUs",),
    "APIs": ("Ollama's downloads",),
}
"""Unsupported features, by area."""


def not_there(what: str) -> str:
    """Return the sentence that refuses `what`, an entry of `NOT_THERE`."""
    if not any(what in some for some in NOT_THERE.values()):
        raise ValueError(f"{what!r} isn't in NOT_THERE")
    return f"{what} aren't supported"
