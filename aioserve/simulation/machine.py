"""The machine that is simulated: what its steps take and what its memory holds, from a cost table
where one is given."""

from __future__ import annotations

from typing import NamedTuple

from aioserve.capacity.capacity import capacity_of
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.errors import ConfigError
from aioserve.request import MAX_SEED
from aioserve.simulation.cost import CostModel, CostTable, RooflineCost
from aioserve.simulation.latency_profile import read_cost
from aioserve.simulation.trial_options import TrialOptions
from aioserve.traces.checks import check_int

__all__ = ["Machine", "machine_of"]


class Machine(NamedTuple):
    cost: CostModel
    num_pages: int | None
    max_model_len: int | None
    scatter_seed: int | None
    """None where steps don't scatter."""


def machine_of(options: TrialOptions) -> Machine:
    """Of the options of `aioserve simulate` that are about it. Raises `ConfigError` for those that
    would be ignored, and as what it reads."""
    if options.cost is not None and options.cost_table is not None:
        raise ConfigError("give either a cost model or cost_table, and not both")
    if options.cost_table is not None:
        if options.unbounded_cache or options.num_pages is not None:
            _check_unused(options, "is given too")
        table: CostModel = read_cost(options.cost_table)
    elif options.cost is not None:
        table = options.cost
    else:
        hardware = hardware_preset(options.hardware).times(options.num_devices)
        table = RooflineCost(ModelShape.of(read_model(options.model)), hardware)
    if not isinstance(table, CostTable):
        if not options.scatter:
            raise ConfigError(
                "scatter: without a cost table steps take what the roofline says, so leave out "
                "--no-scatter"
            )
        return Machine(table, _num_pages(options, None), options.max_model_len, None)
    if table.scatter is None and not options.scatter:
        raise ConfigError(
            f"scatter: {options.cost_table} has none, so leave out --no-scatter: each step takes "
            "what it says"
        )
    seed = options.seed or 0
    check_int("seed", seed, 0, MAX_SEED)
    scatters = options.scatter and table.scatter is not None
    longest = options.max_model_len
    if longest is None and table.kv is not None:
        longest = table.kv.max_model_len
    return Machine(table, _num_pages(options, table), longest, seed if scatters else None)


def _num_pages(options: TrialOptions, table: CostTable | None) -> int | None:
    if options.unbounded_cache:
        if options.num_pages is not None:
            raise ConfigError("give either --num-pages or --unbounded-cache, and not both")
        return None
    if options.num_pages is not None:
        return options.num_pages
    if table is not None and (measured := table.kv) is not None:
        _check_unused(options, "is in it too")
        # As many tokens as the measured machine held, in pages of this size.
        return max(1, measured.num_pages * measured.page_size // max(1, options.page_size))
    capacity = capacity_of(
        options.model,
        read_model(options.model),
        gpu_memory_bytes=hardware_preset(options.hardware).memory_bytes,
        num_gpus=options.num_devices,
        page_size=options.page_size,
    )
    if capacity.num_pages < 1:
        raise ConfigError(
            f"{options.model} leaves no room for KV pages on num_devices={options.num_devices} "
            f"of {options.hardware}: give more of them, or num_pages"
        )
    return capacity.num_pages


def _check_unused(options: TrialOptions, why: str) -> None:
    """Raise for options about which nothing is asked: the table has the steps, and the number of
    pages is known."""
    defaults = TrialOptions()
    for name in ("model", "hardware", "num_devices"):
        if getattr(options, name) != getattr(defaults, name):
            raise ConfigError(
                f"{name}: the cost table says how long steps take, and the number of pages {why}, "
                f"got {getattr(options, name)!r}"
            )
