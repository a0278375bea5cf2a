"""Memory calculator: how many requests fit. It only calculates; nothing is measured or loaded.

    memory of a GPU = its share of the weights + KV pages + what `memory_utilization` leaves free

Tensor parallelism gives every GPU a part of each matrix and of the KV heads, and so a part of each
page. The latent vector of latent attention belongs to all heads, and each GPU keeps it. Layers with
a window keep pages only of the window, as `aioserve.paging.layout` says.

Requests are assumed to share nothing and to be as long as the context; a cached prefix only makes
room for more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import msgspec

from aioserve.capacity.hardware import MAX_DEVICES, MAX_MEMORY_BYTES, check
from aioserve.capacity.sizes import ModelSizes, ParameterCount
from aioserve.capacity.weights import ModelWeights
from aioserve.config import PAGE_SIZES
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.models.config import DecoderConfig
from aioserve.paging.format import COUNTED_KV_FORMATS
from aioserve.paging.layout import KVLayout
from aioserve.paging.pages import pages_of_sequence, tokens_of_sequence

__all__ = [
    "BITS",
    "GIB",
    "PRECISIONS",
    "Capacity",
    "ContextCapacity",
    "DraftMemory",
    "capacity_of",
    "kv_bytes_per_token",
    "precisions",
    "weight_bytes",
]

GIB = 1 << 30
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
PRECISIONS = tuple(BITS)
"""Precisions of weights."""
INT4_GROUP = 128
"""Weights that share a 16-bit scale and a 4-bit zero point, as in AWQ and GPTQ checkpoints."""
INT4_GROUP_BITS = 16 + 4
MAX_CONTEXTS = 1000
MAX_LISTED = 20
DEFAULT_CONTEXTS = (4096, 32_768, 131_072)


class ContextCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one length."""

    context_tokens: int
    """Tokens of prompt and answer together."""
    kv_bytes_per_request: int
    """Bytes of KV on all GPUs together, in whole pages."""
    pages_per_request: int
    """Pages once the request is complete: of layers with a window, the pages of the last window."""
    concurrent_requests: int
    """Number of requests of this length that fit at the same time."""


class DraftMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a draft model or head, divided among its GPUs as the model is."""

    draft: str
    """Name of a draft model, or directory of a head."""
    kind: str
    """`model`, or the kind of head: `eagle3`, `mtp` or `medusa`."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Bytes of KV in all its layers, which keep every position."""
    num_kv_heads: int
    """KV heads that the GPUs divide. Each GPU has at least one. 0: it keeps no keys and values."""
    state_bytes_per_token: int
    """Hidden states of the model's layers that a head reads. Each GPU has them."""

    def weight_bytes_on(self, num_gpus: int) -> int:
        """Return the bytes on one of `num_gpus`."""
        return -(-self.weight_bytes // num_gpus)

    def bytes_per_page(self, page_size: int, num_gpus: int = 1) -> int:
        """Return the bytes beside each page of the model, on one of `num_gpus`."""
        kv = self.kv_bytes_per_token
        if self.num_kv_heads:
            kv = kv // self.num_kv_heads * -(-self.num_kv_heads // num_gpus)
        return (kv + self.state_bytes_per_token) * page_size


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Use of memory by a model. Bytes are a total, unless the name says per GPU."""

    model: str
    dtype: str
    """Precision of the weights, one of `PRECISIONS`.

    Below 16 bits it is that of the layers' matrices. Embeddings, output head, norms and biases keep
    16, as they mostly do in such checkpoints. If `weights` says more, that counts.
    """
    kv_dtype: str
    """Format of the KV, one of `aioserve.paging.format.COUNTED_KV_FORMATS`."""
    weights: ModelWeights | None
    """Weights by the formats of the files; None without files, or if `dtype` was given."""
    num_gpus: int
    gpu_memory_bytes: int
    """Memory of each GPU."""
    memory_utilization: float
    """Share of the memory beside the weights that KV pages take."""
    page_size: int
    num_parameters: int
    num_active_parameters: int
    """Parameters that compute one token: a mixture of experts uses a part of them."""
    weight_bytes: int
    weight_bytes_per_gpu: int
    kv_bytes_per_token: int
    """Bytes of KV in all layers of all GPUs, while the token is in all windows."""
    kv_bytes_per_token_per_gpu: int
    page_bytes_per_gpu: int
    """Bytes of the layers that share a page: all, or a group of them if some keep a window."""
    draft: DraftMemory | None
    """Memory of the drafter, whose bytes are in none of the other fields; None without one."""
    num_window_groups: int
    """Groups of layers whose pages are freed when the window has passed."""
    window_tokens: int
    """Last positions that these keep; 0: there are none."""
    weights_fit: bool
    num_pages: int
    """Number of pages. A page is spread over all GPUs, so each of them has as many."""
    capacity_tokens: int
    """Tokens of one sequence, were it that long, whose KV the pages hold."""
    contexts: tuple[ContextCapacity, ...]
    fewest_gpus: int | None
    """Number of such GPUs that hold the weights and one request of the longest context.

    None: no number that divides the heads does.
    """
    refused: str
    """Reason why the engine doesn't load the model; empty if it does."""


def weight_bytes(count: ParameterCount, dtype: str, num_gpus: int = 1) -> int:
    """Return the bytes on one of `num_gpus` that share the weights evenly.

    Norms and biases are on each. The scales of fp8 and int8, one for each row of a matrix, are left
    out: less than 0.1 %.
    """
    _check_choice("dtype", dtype, PRECISIONS)
    check("num_gpus", num_gpus, 1, MAX_DEVICES)
    bits = BITS[dtype]
    other_bits = max(bits, 16)
    shared_bits = count.matrices * bits + count.embeddings * other_bits
    if dtype == "int4":
        shared_bits += -(-count.matrices // INT4_GROUP) * INT4_GROUP_BITS
    return -(-shared_bits // (8 * num_gpus)) + count.vectors * other_bits // 8


def kv_bytes_per_token(sizes: ModelSizes, dtype: str, num_gpus: int = 1) -> int:
    """Return the bytes of KV of one token in all layers, on one of `num_gpus` that share the heads.

    Raises `ConfigError` unless every GPU gets the same number of heads.
    """
    layout = _layout(sizes, dtype, num_gpus)
    return layout.num_layers * layout.entry.num_bytes


def _layout(sizes: ModelSizes, dtype: str, num_gpus: int) -> KVLayout:
    """Return the layout on each of the GPUs. Raises like `kv_bytes_per_token`."""
    _check_choice("kv_dtype", dtype, tuple(COUNTED_KV_FORMATS))
    heads = sizes.shared_heads
    if type(num_gpus) is not int or not 1 <= num_gpus <= MAX_DEVICES or heads % num_gpus:
        counts = _gpu_counts(sizes)
        listed = ", ".join(map(str, counts[:MAX_LISTED])) + ", ..." * (len(counts) > MAX_LISTED)
        kind = "query heads" if sizes.is_latent else "KV heads"
        raise ConfigError(
            f"num_gpus must divide the model's {heads} {kind} ({listed}), got {shown(num_gpus)}: "
            "copies of one head on several GPUs (replication) are not planned for"
        )
    return sizes.layout(COUNTED_KV_FORMATS[dtype], num_gpus)


def capacity_of(
    model: str,
    config: DecoderConfig | ModelSizes,
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    weights: ModelWeights | None = None,
    on_cpu: bool = False,
    contexts: Sequence[int] = (),
    gpu_memory_bytes: int = 80 * GIB,
    num_gpus: int = 1,
    memory_utilization: float = 0.9,
    page_size: int = 16,
    draft: DraftMemory | None = None,
) -> Capacity:
    """Return how much fits. `model` is a name for the result and for messages.

    dtype: "auto" is what config.json says, or bfloat16 if it says nothing.

    weights: those in the model's files, which then take the memory that an engine needs for them.
    None: they take what `dtype` says. They can't be given beside a dtype.

    on_cpu: true if a CPU holds the weights.

    kv_dtype: "auto" is `dtype`, or bfloat16 if that has fewer than 16 bits.

    draft: memory of the drafter, which leaves room for fewer pages.

    contexts: lengths in tokens. None given: 4K, 32K and 128K, or the model's longest in place of
    those beyond it.

    Raises `ConfigError` for a value outside its range, with argument, value and limit.
    """
    sizes = config if isinstance(config, ModelSizes) else ModelSizes.of(config)
    if weights is not None and dtype != "auto":
        raise ConfigError(f"dtype must be left out where weights are given, got {shown(dtype)}")
    precision, kv_dtype = precisions(sizes, dtype, kv_dtype)
    count = sizes.parameters
    layout = _layout(sizes, kv_dtype, num_gpus)
    gpu_token_bytes = kv_bytes_per_token(sizes, kv_dtype, num_gpus)
    windows = {"num_window_groups": layout.num_window_groups, "window": layout.window}

    def weights_on(gpus: int) -> int:
        if weights is None:
            return weight_bytes(count, precision, gpus)
        vectors = weight_bytes(ParameterCount(0, 0, count.vectors), precision)
        return -(-(weights.on(on_cpu).held_bytes - vectors) // gpus) + vectors

    gpu_weight_bytes = weights_on(num_gpus)
    _check_memory(gpu_memory_bytes, memory_utilization, page_size)
    lengths = _lengths(model, sizes, contexts)

    def draft_on(gpus: int) -> tuple[int, int]:
        """Return the bytes of a draft's weights, and those beside each page."""
        if draft is None:
            return 0, 0
        return draft.weight_bytes_on(gpus), draft.bytes_per_page(page_size, gpus)

    def pages_on(gpus: int) -> int:
        draft_bytes, draft_page_bytes = draft_on(gpus)
        beside = gpu_memory_bytes - weights_on(gpus) - draft_bytes
        page_bytes = _layout(sizes, kv_dtype, gpus).bytes_per_page(page_size) + draft_page_bytes
        return math.floor(max(0, beside) * memory_utilization) // page_bytes

    def context(tokens: int, num_pages: int) -> ContextCapacity:
        pages = pages_of_sequence(tokens, page_size, **windows)
        return ContextCapacity(
            context_tokens=tokens,
            kv_bytes_per_request=pages * layout.bytes_per_page(page_size) * num_gpus,
            pages_per_request=pages,
            concurrent_requests=num_pages // pages,
        )

    longest_pages = pages_of_sequence(lengths[-1], page_size, **windows)
    enough = (gpus for gpus in _gpu_counts(sizes) if pages_on(gpus) >= longest_pages)
    num_pages = pages_on(num_gpus)
    return Capacity(
        model=model,
        dtype=precision,
        kv_dtype=kv_dtype,
        weights=weights,
        num_gpus=num_gpus,
        gpu_memory_bytes=gpu_memory_bytes,
        memory_utilization=memory_utilization,
        page_size=page_size,
        num_parameters=count.total,
        num_active_parameters=sizes.num_active_parameters,
        weight_bytes=weights_on(1),
        weight_bytes_per_gpu=gpu_weight_bytes,
        kv_bytes_per_token=gpu_token_bytes * num_gpus,
        kv_bytes_per_token_per_gpu=gpu_token_bytes,
        page_bytes_per_gpu=layout.bytes_per_page(page_size),
        num_window_groups=layout.num_window_groups,
        window_tokens=layout.window,
        draft=draft,
        weights_fit=gpu_weight_bytes + draft_on(num_gpus)[0] <= gpu_memory_bytes,
        num_pages=num_pages,
        capacity_tokens=tokens_of_sequence(num_pages, page_size, **windows),
        contexts=tuple(context(tokens, num_pages) for tokens in lengths),
        fewest_gpus=next(enough, None),
        refused=sizes.refused,
    )


def _lengths(model: str, sizes: ModelSizes, contexts: Sequence[int]) -> list[int]:
    """Return each length once, the shortest first."""
    longest = sizes.max_position_embeddings
    lengths = tuple(islice(contexts, MAX_CONTEXTS + 1)) if isinstance(contexts, Sequence) else None
    if lengths is None or len(lengths) > MAX_CONTEXTS:
        raise ConfigError(
            f"contexts must be a sequence of at most {MAX_CONTEXTS}, got {shown(contexts)}"
        )
    for tokens in lengths:
        if type(tokens) is not int or not 1 <= tokens <= longest:
            raise ConfigError(f"context must be in [1, {longest}] for {model}, got {shown(tokens)}")
    return sorted(set(lengths or (min(tokens, longest) for tokens in DEFAULT_CONTEXTS)))


def _gpu_counts(sizes: ModelSizes) -> list[int]:
    """Return the numbers that divide the heads, the smallest first, up to `MAX_DEVICES`."""
    heads = sizes.shared_heads
    return [count for count in range(1, min(heads, MAX_DEVICES) + 1) if heads % count == 0]


def precisions(sizes: ModelSizes, dtype: str = "auto", kv_dtype: str = "auto") -> tuple[str, str]:
    """Return the precision of weights and the format of KV, with a value in place of "auto".

    Raises `ConfigError` for others.
    """
    _check_choice("dtype", dtype, ("auto", *PRECISIONS))
    _check_choice("kv_dtype", kv_dtype, ("auto", *COUNTED_KV_FORMATS))
    if dtype == "auto":
        dtype = sizes.dtype or "bfloat16"
    if kv_dtype == "auto":
        kv_dtype = dtype if BITS[dtype] >= 16 else "bfloat16"
    return dtype, kv_dtype


def _check_memory(gpu_memory_bytes: int, memory_utilization: float, page_size: int) -> None:
    _check_choice("page_size", page_size, PAGE_SIZES)
    check("gpu_memory_bytes", gpu_memory_bytes, 1, MAX_MEMORY_BYTES)
    if type(memory_utilization) not in (int, float) or not 0 < memory_utilization <= 1:
        raise ConfigError(
            "memory_utilization must be a number above 0 and at most 1, got "
            f"{shown(memory_utilization)}"
        )


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if type(value) is not type(choices[0]) or value not in choices:
        listed = ", ".join(map(str, choices))
        raise ConfigError(f"{name} must be one of {listed}, got {shown(value)}")
