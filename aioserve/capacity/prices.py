"""Prices of GPUs, from a table that users replace."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from aioserve.capacity.hardware import PRESETS, check
from aioserve.errors import ConfigError

__all__ = ["EXAMPLE_PRICES", "Prices", "read_prices"]

MAX_PRICE = 1e12
MAX_FILE_BYTES = 1 << 20

EXAMPLE_PRICES = """\
# Examples, and no offers: round numbers that were taken from no price list. Write a file like this
# one with your own prices, and name it with --prices.
as_of = "2025-12"
currency = "USD"
is_example = true

[per_hour]
h200 = 3.50
h100 = 2.50
a100 = 1.50
l4 = 0.70
cpu = 0.20
"""


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of one device for an hour, by the names of hardware presets.

    Raises `ConfigError` for a name that is no preset, and for a price below 0.
    """

    as_of: str
    """Date of the prices, as their author writes it."""
    currency: str
    per_hour: dict[str, float]
    is_example: bool = False
    """True for the bundled prices."""

    def __post_init__(self) -> None:
        for name, price in self.per_hour.items():
            if name not in PRESETS:
                known = ", ".join(PRESETS)
                raise ConfigError(f"per_hour.{name} is no hardware; there are: {known}")
            check(f"per_hour.{name}", price, 0.0, MAX_PRICE)

    def of(self, hardware: str) -> float:
        """Return the price of an hour of one device. Raises `ConfigError` if the table has none."""
        if hardware not in self.per_hour:
            raise ConfigError(f"the prices have no row for {hardware} in [per_hour]")
        return self.per_hour[hardware]


def read_prices(path: str | None = None) -> Prices:
    """Read a TOML file of prices, or the bundled examples without one. Raises `ConfigError`."""
    source = "the bundled prices" if path is None else path
    try:
        text = EXAMPLE_PRICES if path is None else _text_of(Path(path))
        return msgspec.convert(tomllib.loads(text), Prices)
    except RecursionError as error:
        raise ConfigError(f"prices: {source} can't be read: it is nested too deeply") from error
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"prices: {source} can't be read: {error}") from error


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"prices: {path} has more than {MAX_FILE_BYTES} bytes")
    return content.decode("utf-8")
