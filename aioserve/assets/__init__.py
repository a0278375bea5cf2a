"""Files that are installed with the package."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_MODELS = ("pyhelp",)
"""Names of the models that the package carries."""


EMBEDDED_DRAFTS = {
    ("pyhelp", "model"): "pyhelp-draft",
    ("pyhelp", "eagle3"): "pyhelp-eagle3",
}
"""Drafters of embedded models, by the names of model and drafter: a small model with the same
tokens, and a head.
"""


def model_path(name: str) -> Path | None:
    """Return the directory of the embedded model ``name``, or None if there is no model of that
    name.
    """
    if name not in EMBEDDED_MODELS:
        return None
    path = Path(__file__).resolve().parent / name
    return path if (path / "config.json").is_file() else None


def draft_path(name: str, drafter: str = "model") -> Path | None:
    """Return the directory of the drafter ``drafter`` of the embedded model ``name``, or None.

    It has no tokenizer of its own: it uses that of the embedded model.
    """
    directory = EMBEDDED_DRAFTS.get((name, drafter))
    return None if directory is None else Path(__file__).resolve().parent / directory
