"""Files that are installed with the package."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_MODELS = ("pyhelp",)
"""The names of the models that the package carries."""


EMBEDDED_DRAFTS = {"pyhelp": "pyhelp-draft"}
"""The small model that guesses for each embedded model, which has the same tokens."""


def model_path(name: str) -> Path | None:
    """Return the directory of the embedded model ``name``, or None if there is no such model."""
    if name not in EMBEDDED_MODELS:
        return None
    path = Path(__file__).resolve().parent / name
    return path if (path / "config.json").is_file() else None


def draft_path(name: str) -> Path | None:
    """Return the directory of the small model that guesses for the embedded model ``name``, or None
    if there is none. It has no tokenizer: it has that of the embedded model."""
    if name not in EMBEDDED_DRAFTS:
        return None
    return Path(__file__).resolve().parent / EMBEDDED_DRAFTS[name]
