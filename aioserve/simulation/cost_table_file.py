"""Cost tables in files, as `aioserve calibrate` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import asdict

from aioserve.errors import ConfigError, TraceError
from aioserve.simulation.cost import NO_TIME, CostTable, HostTimes, MeasuredKV
from aioserve.traces.files import open_file, short

__all__ = ["CostTableFile", "read_cost_table"]

MAX_TABLE_BYTES = 16 << 20


class CostTableFile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"step_noise": "scatter"}
):
    """A cost table as JSON: the arguments of `CostTable`, and two more fields.

    `step_noise` is called scatter in version 1 of the format.
    """

    prefill_tokens: tuple[int, ...]
    decode_batch: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    seconds_per_context_token: float = 0.0
    seconds_per_attended_pair: float = 0.0
    step_noise: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    max_context_tokens: int | None = None
    max_attended_pairs: int | None = None
    kv: MeasuredKV | None = None
    noise_order: tuple[int, ...] | None = None
    host: HostTimes = NO_TIME
    measured: dict[str, str | int | float | bool | None] = {}
    """Origin of the figures: for people, not read by the simulator."""
    version: Literal[1] = 1
    """Version of the format."""

    def table(self) -> CostTable:
        """Make the table. Raises `ConfigError` for invalid figures."""
        fields = asdict(self)
        del fields["measured"], fields["version"]
        return CostTable(**fields)


def read_cost_table(path: str | Path) -> CostTable:
    """Read the table in a file that `CostTableFile` describes.

    Raises `ConfigError` for anything else, naming the file.
    """
    place = f"cost table {short(path)}"
    try:
        with open_file(path) as file:
            data = file.read(MAX_TABLE_BYTES + 1)
        if len(data) > MAX_TABLE_BYTES:
            raise ConfigError(f"a file of over {MAX_TABLE_BYTES:,} bytes")
        return msgspec.json.decode(data, type=CostTableFile).table()
    except TraceError as error:
        raise ConfigError(f"cost table {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{place}: nested too deeply") from error
    except (OSError, ValueError) as error:  # errors of JSON and of the table are ValueErrors
        raise ConfigError(f"{place}: {short(error)}") from error
