"""Methods of `aioserve quantize` that take a text, by name."""

from __future__ import annotations

from aioserve.errors import ConfigError
from aioserve.models.quantization.calibrated.gptq_method import Gptq
from aioserve.models.quantization.calibrated.layer_inputs import Windows
from aioserve.models.quantization.calibrated.scaled import ActivationAware, Scaled, SmoothQuant
from aioserve.models.quantization.method import CALIBRATED, Method
from aioserve.models.quantization.storing import chosen_group_size, method_named
from aioserve.models.quantization.word_storing import AwqStoring

__all__ = ["calibrated_method"]

DEFAULT_GROUP_SIZE = 128
DEFAULT_ALPHA = 0.5


def calibrated_method(
    name: str, group_size: int | None, windows: Windows, smoothquant: float | None = None
) -> Method:
    """Return the method `name`: gptq, awq, or w8a8 with SmoothQuant.

    The default of `group_size` is 128, that of SmoothQuant's alpha `smoothquant` 0.5. Raises
    `ConfigError`."""
    if name == "w8a8":
        alpha = DEFAULT_ALPHA if smoothquant is None else smoothquant
        return Scaled(method_named(name, group_size), SmoothQuant(alpha), windows)
    if name not in CALIBRATED:
        raise ConfigError(
            f"method must be {', '.join(CALIBRATED)} or w8a8 with a text, got {name!r}",
            argument="method",
            value=name,
        )
    size = chosen_group_size(group_size, DEFAULT_GROUP_SIZE)
    if name == "gptq":
        return Gptq(size, windows)
    storing = AwqStoring(size)
    return Scaled(storing, ActivationAware(storing), windows)
