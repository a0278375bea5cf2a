"""From the word that names a model on the command line to what an `Engine` loads.

A directory, an embedded model, a hub id, which is downloaded where it isn't in the cache, or a
`random:SHAPE`. Says what to type where the word is none of these.
"""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec

from aioserve.cli._hub import download, is_hub_id
from aioserve.cli.random_models import PREFIX, SHAPES, model_or_random
from aioserve.errors import ModelNotFoundError
from aioserve.isolation import shown
from aioserve.models.resolve import expanded, like_embedded, resolve

__all__ = ["EMBEDDED", "check_model", "local_model"]

EMBEDDED = "pyhelp"
MOST_QUOTED_CHARS = 80
"""A prompt that a message repeats has at most so many characters."""


def local_model(model: str) -> str:
    """What an engine takes for `model`, once its files are on this machine.

    Writes random models and downloads hub ids. Raises `ModelNotFoundError` and `ModelError`.
    """
    if _is_downloaded(model):
        download(model)
    return model_or_random(model)


def check_model(model: str, prompt: str | None) -> None:
    """Raise `ModelNotFoundError` that says what to type, where `model` can be no model. Does
    nothing long: what is to be downloaded counts as a model."""
    if model.startswith(PREFIX) and model.removeprefix(PREFIX) in SHAPES:
        return
    if _is_downloaded(model):
        if prompt is not None and _is_here(prompt):  # such as a prompt `and/or` before the model
            raise ModelNotFoundError(_advice(model, prompt))
        return
    try:
        resolve(model_or_random(model))
    except ModelNotFoundError as error:
        raise ModelNotFoundError(_advice(model, prompt) or str(error)) from error


def _is_downloaded(model: str) -> bool:
    """Whether it is looked for at the hub: it has the shape of an id, and is nothing here."""
    if not is_hub_id(model) or os.path.exists(expanded(model)):
        return False
    try:
        resolve(model)
    except ModelNotFoundError:
        # Without the library the error of `resolve` names it, and where else was looked.
        return find_spec("huggingface_hub") is not None
    return False


def _advice(model: str, prompt: str | None) -> str | None:
    """What to type, where the words are in another order, or the model was left out."""
    if prompt is not None and _is_here(prompt):
        return (
            f"{shown(model)} is no model; the model comes first, type: "
            f"aioserve run {_quoted(prompt)} {_quoted(model)}"
        )
    is_path = "/" in model and not any(char.isspace() for char in model)
    if not model or is_path or os.path.exists(expanded(model)):
        return None
    if (near := like_embedded(model)) is not None:
        rest = "" if prompt is None else f" {_quoted(prompt)}"
        return f"{shown(model)} is no model; did you mean: aioserve run {near}{rest}"
    if prompt is not None:
        return None
    advice = (
        f"{shown(model)} is no model; for the embedded model type: "
        f"aioserve run {EMBEDDED} {_quoted(model)}"
    )
    if any(char.isspace() for char in model):
        return advice
    return f"{advice}; a model of the Hugging Face hub is named OWNER/NAME"


def _is_here(name: str) -> bool:
    try:
        resolve(name)
    except ModelNotFoundError:
        return False
    return True


def _quoted(text: str) -> str:
    """As a shell takes it."""
    if len(text) > MOST_QUOTED_CHARS or not text.isprintable():
        return '"..."'
    quoted = shlex.quote(text)
    return f"-- {quoted}" if text.startswith("-") else quoted
