"""A family of models as a frozen value: the bundled ones, and those that plugins declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from aioserve.isolation import shown
from aioserve.models.architecture import Architecture
from aioserve.models.fields import Fields

__all__ = ["ModelFamily", "check_family"]


class ModelFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A family of decoders: how its config.json becomes a description of its blocks.

    The blocks are those of `aioserve.architectures`, which every backend computes. A family that
    computes something else can't be declared.
    """

    model_type: str
    """`model_type` of config.json. It finds the family where `architectures` is missing."""
    describe: Callable[[Fields], Architecture]
    """Describes the decoder of one config.json. It depends on the fields alone, and refuses a
    setting that would change what is computed and that it doesn't describe: `Fields.unsupported`
    raises that. Called on any thread, several times for one model."""
    example: Mapping[str, Any] = {}
    """A small config.json of the family, for checks: a model with random weights is made of it."""


def check_family(family: object) -> None:
    """Raise `ValueError`, in words, for what is no family of models."""
    if not isinstance(family, ModelFamily):
        raise ValueError(f"must be a ModelFamily, got {shown(family)}")
    if type(family.model_type) is not str or not family.model_type.strip():
        got = shown(family.model_type)
        raise ValueError(f"model_type must be a str that isn't empty, got {got}")
    if not callable(family.describe):
        raise ValueError(f"describe must be callable, got {shown(family.describe)}")
    if not isinstance(family.example, Mapping):
        raise ValueError(f"example must be a mapping, got {shown(family.example)}")
