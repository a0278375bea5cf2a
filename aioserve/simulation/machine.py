"""The simulated machine: the time of its steps and the size of its memory, from a cost table if one
is given.
"""

from __future__ import annotations

from typing import NamedTuple

from aioserve.capacity.capacity import capacity_of, precisions
from aioserve.capacity.hardware import hardware_preset
from aioserve.capacity.models import ModelShape, read_model
from aioserve.capacity.sizes import ModelSizes
from aioserve.capacity.weights import read_weights
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.paging.format import COUNTED_KV_FORMATS
from aioserve.paging.layout import KVLayout
from aioserve.sampling_params import MAX_SEED
from aioserve.simulation.calibration import read_cost
from aioserve.simulation.cost import CostModel, CostTable
from aioserve.simulation.options import LIMITS, TrialOptions
from aioserve.simulation.roofline import RooflineCost
from aioserve.traces.checks import check_int

__all__ = ["Device", "Machine", "machine_of"]


class Device(NamedTuple):
    """Model and hardware of a roofline, and the number of devices."""

    model: str
    hardware: str
    num_devices: int

    @property
    def is_cpu(self) -> bool:
        return self.hardware == "cpu"

    def __str__(self) -> str:
        return f"{self.model} on {self.num_devices} x {self.hardware}"


UNLESS_GIVEN = Device("llama-3-8b", "h100", 1)


class Machine(NamedTuple):
    cost: CostModel
    device: Device | None
    """Device of the roofline or the memory; None if neither needs one."""
    num_pages: int | None
    max_model_len: int | None
    noise_seed: int | None
    """Seed of the noise; None if steps don't vary."""
    num_window_groups: int = 0
    """Groups of layers whose pages leave with the window, as in `KVLayout`."""
    window: int = 0
    """Last positions that these groups keep, in tokens; 0 without window groups."""


def machine_of(options: TrialOptions) -> Machine:
    """Make the machine for the options of `aioserve simulate`.

    Raises `ConfigError` for options that would have no effect, and what reading the files raises.
    """
    if options.cost is not None and options.cost_table is not None:
        raise ConfigError("give either a cost model or cost_table, and not both")
    if options.unbounded_cache and options.num_pages is not None:
        raise ConfigError("give either --num-pages or --unbounded-cache, and not both")
    device = _device_of(options)
    is_given = options.cost_table is not None or options.cost is not None
    if is_given and (known := _pages_known(options, None)) is not None:
        _check_unused(options, known)
    if options.cost_table is not None:
        cost: CostModel = read_cost(options.cost_table)
    elif options.cost is not None:
        cost = options.cost
    else:
        hardware = hardware_preset(device.hardware).times(device.num_devices)
        per_page = _layout_of(device, options).layers_per_page
        cost = RooflineCost(_shape_of(device), hardware, layers_per_page=per_page)
    table = cost if isinstance(cost, CostTable) else None
    _check_noise(options, table)
    known = _pages_known(options, table)
    if is_given and known is not None:
        _check_unused(options, known)
    longest = options.max_model_len
    if longest is None and table is not None and table.kv is not None:
        longest = table.kv.max_model_len
    used = None if is_given and known is not None else device
    num_window_groups, window = _windows(options, table, used)
    return Machine(
        cost,
        used,
        _num_pages(options, table, device),
        longest,
        _noise_seed(options, table),
        num_window_groups,
        window,
    )


def _sizes_of(device: Device, options: TrialOptions) -> ModelSizes:
    """Return the model's sizes for the contexts that an engine with these options takes.

    Raises `ConfigError` for an invalid length.
    """
    sizes, longest = ModelSizes.of(read_model(device.model)), options.max_model_len
    if longest is None:
        return sizes
    check_int("max_model_len", longest, *LIMITS["max_model_len"])
    return sizes.up_to(longest)


def _layout_of(device: Device, options: TrialOptions) -> KVLayout:
    """Return the layout of the model's pages, in the format that an engine chooses. Raises as
    `_sizes_of`.
    """
    sizes = _sizes_of(device, options)
    return sizes.layout(COUNTED_KV_FORMATS[precisions(sizes)[1]])


def _windows(
    options: TrialOptions, table: CostTable | None, device: Device | None
) -> tuple[int, int]:
    """Return the window groups and their window: the device's model's, or the measured engine's."""
    if device is not None:
        layout = _layout_of(device, options)
        return layout.num_window_groups, layout.window
    if table is not None and table.kv is not None:
        return table.kv.num_window_groups, table.kv.window
    return 0, 0


def _shape_of(device: Device) -> ModelShape:
    """Return the shape of the model, with its weights' bytes if local files have quantised
    weights.
    """
    shape, weights = ModelShape.of(read_model(device.model)), read_weights(device.model)
    if weights is None or not weights.are_quantised:
        return shape
    held = weights.on(device.is_cpu)
    return shape.with_weight_bytes(held.step_bytes, held.expert_bytes)


def _device_of(options: TrialOptions) -> Device:
    given = {name: getattr(options, name) for name in Device._fields}
    return UNLESS_GIVEN._replace(
        **{name: value for name, value in given.items() if value is not None}
    )


def _check_noise(options: TrialOptions, table: CostTable | None) -> None:
    """Raise for `step_noise` without a table that has noise."""
    if options.step_noise is None or (table is not None and table.step_noise is not None):
        return
    flag = "--step-noise" if options.step_noise else "--no-step-noise"
    if table is None:
        raise ConfigError(
            "step_noise: without a cost table steps take what the roofline says, so leave out "
            f"{flag}"
        )
    raise ConfigError(
        f"step_noise: {options.cost_table or 'the cost table'} has none, so leave out {flag}: each "
        "step takes what it says"
    )


def _noise_seed(options: TrialOptions, table: CostTable | None) -> int | None:
    if table is None:
        return None
    seed = options.seed or 0
    check_int("seed", seed, 0, MAX_SEED)
    return None if table.step_noise is None or options.step_noise is False else seed


def _pages_known(options: TrialOptions, table: CostTable | None) -> str | None:
    """Return why the number of pages is known without a device; None if it isn't."""
    if options.unbounded_cache or options.num_pages is not None:
        return "is given too"
    return None if table is None or table.kv is None else "is in it too"


def _num_pages(options: TrialOptions, table: CostTable | None, device: Device) -> int | None:
    if options.unbounded_cache:
        return None
    if options.num_pages is not None:
        return options.num_pages
    if table is not None and (measured := table.kv) is not None:
        # As many tokens as the measured machine held, in pages of this size.
        return max(1, measured.num_pages * measured.page_size // max(1, options.page_size))
    capacity = capacity_of(
        device.model,
        _sizes_of(device, options),
        weights=read_weights(device.model),
        on_cpu=device.is_cpu,
        gpu_memory_bytes=hardware_preset(device.hardware).memory_bytes,
        num_gpus=device.num_devices,
        page_size=options.page_size,
    )
    if capacity.num_pages < 1 + capacity.num_window_groups:
        raise ConfigError(
            f"{device.model} leaves no room for KV pages on num_devices={device.num_devices} "
            f"of {device.hardware}: give more of them, or num_pages"
        )
    return capacity.num_pages


def _check_unused(options: TrialOptions, why: str) -> None:
    """Raise for device options that have no effect: times and pages are already known."""
    what = "cost model" if options.cost is not None else "cost table"
    for name in Device._fields:
        if (given := getattr(options, name)) is not None:
            raise ConfigError(
                f"{name}: the {what} says how long steps take, and the number of pages {why}, "
                f"so leave it out, got {shown(given)}"
            )
