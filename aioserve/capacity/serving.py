"""Figures of serving that follow from capacity: speed, price, transfers, and numbers of KV heads.

    context ──► requests at once ──► tokens a second ──► price of a slot and of a million tokens

Everything is arithmetic on data sheets: nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from aioserve.capacity.capacity import Capacity, capacity_of, weight_bytes
from aioserve.capacity.hardware import Hardware
from aioserve.capacity.models import ModelShape
from aioserve.capacity.sizes import ModelSizes, ParameterCount
from aioserve.capacity.work import attended_pairs, kv_tokens_moved
from aioserve.paging.format import COUNTED_KV_FORMATS

__all__ = [
    "LINKS",
    "HeadsRow",
    "Link",
    "ServingRow",
    "TransferRow",
    "decode_seconds",
    "heads_rows",
    "serving_rows",
    "shape_in",
    "transfer_rows",
]

SECONDS_PER_HOUR = 3600
MILLION = 1_000_000


class ServingRow(msgspec.Struct, frozen=True, kw_only=True):
    """Speed and price of decoding, with as many requests of one context as fit."""

    context_tokens: int
    batch: int
    """Requests at once. 0: none fits, and the numbers below are None."""
    step_seconds: float | None
    """Time of one decode step, in which each request has a token. All are at the context's end."""
    tokens_per_second: float | None
    """Tokens of all requests together."""
    price_per_slot_hour: float | None
    """Price of all GPUs for an hour, over the requests at once."""
    price_per_million_tokens: float | None
    """Price of a million generated tokens. Prefills take further time."""


class Link(msgspec.Struct, frozen=True):
    """A link between devices or machines."""

    name: str
    bytes_per_second: float
    """Peak in one direction."""


LINKS = (
    # PCI-SIG: 16 and 32 GT/s for each of 16 lanes, coded 128b/130b.
    Link("PCIe 4.0 x16", 31.5e9),
    Link("PCIe 5.0 x16", 63e9),
    # NVIDIA A100 and H100 data sheets, half of what they state for both directions.
    Link("NVLink 3 (A100)", 300e9),
    Link("NVLink 4 (H100)", 450e9),
    # InfiniBand with four lanes: 200 and 400 Gbit/s.
    Link("InfiniBand HDR", 25e9),
    Link("InfiniBand NDR", 50e9),
)


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    """Time to move the KV of one request over a link, at the link's peak."""

    link: str
    context_tokens: int
    kv_bytes: int
    seconds: float


class HeadsRow(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the same model with another number of KV heads. Weights count as they are."""

    kind: str
    """MHA: a KV head for each query head; GQA: several query heads share one; MQA: all share
    one."""
    num_kv_heads: int
    is_own: bool
    """True for the number that the model has."""
    kv_bytes_per_token: int
    concurrent_requests: tuple[int, ...]
    """Requests at once, for each context."""


def shape_in(shape: ModelShape, count: ParameterCount, dtype: str, kv_dtype: str) -> ModelShape:
    """Return `shape` with weights and KV of these precisions, names as in `capacity_of`."""
    experts = sum(one.num_layers * one.num_experts * one.expert_params for one in shape.experts)
    read = ParameterCount(shape.head_params, count.matrices, count.vectors)
    expert_bytes = weight_bytes(ParameterCount(0, experts, 0), dtype) if experts else 0
    shape = shape.with_weight_bytes(weight_bytes(read, dtype), expert_bytes)
    return replace(shape, kv_format=COUNTED_KV_FORMATS[kv_dtype])


def decode_seconds(shape: ModelShape, hardware: Hardware, batch: int, context_tokens: int) -> float:
    """Return the roofline of a decode step of `batch` sequences, each with `context_tokens` tokens
    in its pages once the step is done."""
    start = context_tokens - 1
    pairs = entries = 0
    for window, num_layers in shape.layers_by_window.items():
        pairs += num_layers * attended_pairs(start, 1, window)
        entries += num_layers * kv_tokens_moved(start, 1, window)
    flops = (
        2 * (shape.layer_params + shape.head_params) + shape.pair_flops // shape.num_layers * pairs
    )
    moved = shape.weight_bytes(batch)
    # Each device reads the latents of all, and of keys and values its own heads alone.
    readers = hardware.num_devices if shape.latent_rank else 1
    moved += readers * batch * (shape.kv_bytes_per_token // shape.num_layers) * entries
    return hardware.step_seconds + max(
        batch * flops / (hardware.flops_per_second * hardware.compute_efficiency),
        moved / (hardware.bytes_per_second * hardware.bandwidth_efficiency),
    )


def serving_rows(
    found: Capacity, shape: ModelShape, hardware: Hardware, price_per_hour: float
) -> list[ServingRow]:
    """Return a row for each context of `found`. `hardware` is one of its GPUs, and
    `price_per_hour` that one's price."""
    together, price = hardware.times(found.num_gpus), price_per_hour * found.num_gpus
    rows: list[ServingRow] = []
    for one in found.contexts:
        batch, context = one.concurrent_requests, one.context_tokens
        step = decode_seconds(shape, together, batch, context) if batch else None
        speed = batch / step if step else None
        rows.append(
            ServingRow(
                context_tokens=context,
                batch=batch,
                step_seconds=step,
                tokens_per_second=speed,
                price_per_slot_hour=price / batch if batch else None,
                price_per_million_tokens=(
                    price / SECONDS_PER_HOUR / speed * MILLION if speed else None
                ),
            )
        )
    return rows


def transfer_rows(found: Capacity, links: Sequence[Link] = LINKS) -> list[TransferRow]:
    """Return the times to move a request's KV, for each link and context."""
    return [
        TransferRow(
            link=link.name,
            context_tokens=one.context_tokens,
            kv_bytes=one.kv_bytes_per_request,
            seconds=one.kv_bytes_per_request / link.bytes_per_second,
        )
        for link in links
        for one in found.contexts
    ]


def heads_rows(found: Capacity, sizes: ModelSizes) -> list[HeadsRow]:
    """Return the model with a KV head for each query head, with its own number, and with one.

    Numbers that its GPUs can't share evenly are left out. Empty for latent attention, which has no
    KV heads to choose.
    """
    if sizes.is_latent:
        return []
    own, most = sizes.num_kv_heads, sizes.num_query_heads
    rows: list[HeadsRow] = []
    for heads in sorted({most, own, 1}, reverse=True):
        if heads % found.num_gpus:
            continue
        other = capacity_of(
            found.model,
            replace(sizes, num_kv_heads=heads),
            dtype="auto" if found.weights is not None else found.dtype,
            kv_dtype=found.kv_dtype,
            weights=found.weights,
            contexts=[one.context_tokens for one in found.contexts],
            gpu_memory_bytes=found.gpu_memory_bytes,
            num_gpus=found.num_gpus,
            memory_utilization=found.memory_utilization,
            page_size=found.page_size,
            draft=found.draft,
        )
        rows.append(
            HeadsRow(
                kind="MHA" if heads == most else "MQA" if heads == 1 else "GQA",
                num_kv_heads=heads,
                is_own=heads == own,
                kv_bytes_per_token=other.kv_bytes_per_token,
                concurrent_requests=tuple(one.concurrent_requests for one in other.contexts),
            )
        )
    return rows
