"""Roofline: the time of steps by a model's sizes and a device's peaks, without measurements."""

from __future__ import annotations

import numpy as np

from aioserve.capacity.hardware import Hardware
from aioserve.capacity.models import ModelShape
from aioserve.capacity.work import attended_pairs, kv_tokens_moved
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.simulation.cost import StepLoad
from aioserve.steps.plan import StepPlan
from aioserve.traces.checks import check_int

__all__ = ["RooflineCost"]


class RooflineCost:
    """Cost of a step: the longer of its arithmetic and its memory traffic, plus a fixed time.

    See Williams et al., "Roofline", CACM 2009.

    Every step reads all weights, and every sequence all keys and values before it. A token costs
    two operations for each weight. It also costs four for each value of a query head and each token
    that it attends to. Swapped pages go over the link to the host meanwhile, both ways at once.

    In a layer with a window a token attends to the last `window` tokens, and a chunk reads those of
    its first token. A token computes its own experts. A step reads the experts of all its tokens,
    as many as `ExpertsShape.num_read` says. Latents are read once, and attended to as if each were
    a key and a value of all heads (absorbed).

    `layers_per_page` is the number of layers whose keys and values a copied page has; None: all.

    Raises `ConfigError` for devices that can't share the model's KV heads evenly, and for more
    layers than there are.
    """

    def __init__(
        self, model: ModelShape, hardware: Hardware, *, layers_per_page: int | None = None
    ) -> None:
        if not isinstance(model, ModelShape) or not isinstance(hardware, Hardware):
            raise ConfigError(
                "a roofline is of a ModelShape and a Hardware, got "
                f"{shown(model)} and {shown(hardware)}"
            )
        if model.num_kv_heads % hardware.num_devices:
            raise ConfigError(
                f"num_devices must divide the model's {model.num_kv_heads} KV heads, which are "
                f"shared evenly, got {hardware.num_devices}"
            )
        if layers_per_page is None:
            layers_per_page = model.num_layers
        check_int("layers_per_page", layers_per_page, 1, model.num_layers)
        self.model = model
        self.hardware = hardware
        self._flops = hardware.flops_per_second * hardware.compute_efficiency
        self._bytes = hardware.bytes_per_second * hardware.bandwidth_efficiency
        self._link_bytes = hardware.host_bytes_per_second * hardware.bandwidth_efficiency
        self._layer_bytes = model.kv_bytes_per_token // model.num_layers
        """Bytes that a token leaves in one layer."""
        self.page_bytes_per_token: int = self._layer_bytes * layers_per_page
        """Bytes of a token in a page, for the layers that share the page."""
        self._layer_pair_flops = model.pair_flops // model.num_layers
        """Operations of a token's attention to one other token in one layer."""
        self._layers = tuple(model.layers_by_window.items())
        """Windows, and the number of layers with each."""

    @property
    def tells_several(self) -> bool:
        """True if `decode_seconds` agrees with `step_seconds`.

        A subclass may override one of them. With windows, each sequence has to be looked at by
        itself.
        """
        return type(self) is RooflineCost and not self.model.windows

    def step_seconds(self, plan: StepPlan) -> float:
        tokens = sampled = pairs = kv_tokens = 0
        copied = out = back = 0
        for item in plan.items:
            tokens += item.count
            sampled += sum([item.most_tokens(row) for row in item.rows])
            for window, num_layers in self._layers:
                kv_tokens += num_layers * kv_tokens_moved(item.index, item.count, window)
                pairs += num_layers * attended_pairs(item.index, item.count, window)
        for copy in plan.copies:
            if copy.from_tier == copy.to_tier:
                copied += 2 * copy.num_tokens
            elif copy.from_tier < copy.to_tier:
                out += copy.num_tokens
            else:
                back += copy.num_tokens
        flops = self._weight_flops(tokens, sampled) + self._layer_pair_flops * pairs
        moved = self.model.weight_bytes(tokens) + self._layer_bytes * kv_tokens
        moved += self.page_bytes_per_token * (copied + out + back)
        swapped = self.page_bytes_per_token * max(out, back)
        return self.hardware.step_seconds + max(
            flops / self._flops, moved / self._bytes, swapped / self._link_bytes
        )

    def decode_seconds(self, load: StepLoad, step: int, count: int) -> list[float]:
        """Return the seconds of `step_seconds`, to the last digit, for `count` steps from number
        `step` on.

        The steps have no copies, and the model no windows. The first has this load, of decoding
        sequences alone. Each further step has one more token of each sequence.
        """
        batch, first, model = load.decode_batch, load.context_tokens, self.model
        flops, read = self._weight_flops(batch, batch), model.weight_bytes(batch)
        last = first + count * batch
        # In int64 and float64 these are the same numbers, unless they are too large.
        most = max(
            flops + model.pair_flops * last, read + model.kv_bytes_per_token * (last + batch)
        )
        context = np.arange(count, dtype=np.int64 if most < 1 << 63 else np.object_) * batch + first
        computed = (flops + model.pair_flops * context) / self._flops
        moved = (read + model.kv_bytes_per_token * (context + batch)) / self._bytes
        return (self.hardware.step_seconds + np.maximum(computed, moved)).tolist()

    def _weight_flops(self, tokens: int, sampled: int) -> int:
        return 2 * (self.model.layer_params * tokens + self.model.head_params * sampled)
