"""Kinds of models that can be read: families and formats of weights, bundled ones and others."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aioserve.models.families import FAMILIES
from aioserve.models.families.family import ModelFamily
from aioserve.models.quantization.config import METHODS, ReadScheme

__all__ = ["BUNDLED_KINDS", "KnownKinds"]


class KnownKinds(msgspec.Struct, frozen=True, kw_only=True):
    """The kinds of models that a reader of files knows."""

    families: Mapping[str, ModelFamily]
    """Families by the name in `architectures` of config.json."""
    schemes: Mapping[str, ReadScheme]
    """Readers of quantized weights by `quant_method` of config.json."""


BUNDLED_KINDS = KnownKinds(families=FAMILIES, schemes=METHODS)
