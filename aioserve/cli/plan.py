"""`aioserve plan MODEL`: requests that fit into the memory of some GPUs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from aioserve.arguments import counted
from aioserve.capacity.capacity import GIB, Capacity, capacity_of
from aioserve.capacity.drafts import memory_of_head, memory_of_model
from aioserve.capacity.hardware import Hardware, hardware_preset
from aioserve.capacity.models import ModelShape, read_model, read_sizes
from aioserve.capacity.prices import Prices, read_prices
from aioserve.capacity.serving import (
    HeadsRow,
    ServingRow,
    TransferRow,
    heads_rows,
    serving_rows,
    shape_in,
    transfer_rows,
)
from aioserve.capacity.sizes import ModelSizes
from aioserve.capacity.weights import ModelWeights, read_weights
from aioserve.cli._streams import json_text
from aioserve.errors import ConfigError
from aioserve.paging.format import COUNTED_KV_FORMATS
from aioserve.plugins import PluginRegistry

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["plan"]

MAX_GPU_MEMORY_GIB = 1 << 20
MAX_SEATS = 1 << 31


def plan(
    model: str,
    /,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_dtype: str = "auto",
    context: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    gpu_memory_gib: float | None = None,
    num_gpus: int = 1,
    memory_utilization: float = 0.9,
    page_size: int = 16,
    draft: str | None = None,
    head: str | None = None,
    hardware: str | None = None,
    prices: str | None = None,
    seats: int | None = None,
    transfers: bool = False,
    heads: bool = False,
    json: bool = False,
) -> None:
    """Show what a model's memory goes to and how many requests fit. Needs no GPU and no weights.

    Args:

        model: A preset such as llama-3-8b, llama-3-70b or qwen3-32b, a config.json, a model
            directory, a GGUF file, an embedded model or a hub id in the local cache.
        dtype: Data type of the weights: float32, bfloat16, float16, fp8, int8, int4, or auto
            (what the files have, or config.json says).
        quantization: Quantise weights of linear layers, as an engine does while it loads them:
            int8, int4 or fp8. Needs the model's files.
        kv_dtype: Data type of keys and values: float32, bfloat16, float16, fp8, int8, or auto
            (that of the weights, bfloat16 if these are quantised).
        context: Tokens of a request, prompt and answer together, as 4096 or 4K; may be given
            several times. Not given: 4K, 32K and 128K, or the model's longest.
        gpu_memory_gib: Memory of each GPU. Not given: that of the hardware, or 80.
        num_gpus: GPUs that share the model by tensor parallelism; must divide its KV heads,
            or the query heads of latent attention.
        memory_utilization: Share of the memory beside the weights that KV pages may take.
        page_size: Tokens of a KV page.
        draft: A draft model for it, named as MODEL is; the GPUs share it, too.
        head: Directory of a head for it.
        hardware: GPU by name, such as h100, to show speeds and prices of decoding.
        prices: TOML file with prices of hardware, in place of the bundled examples.
        seats: Users who share the KV pages, to show the average tokens of each.
        transfers: Show the time to move a request's KV over PCIe, NVLink and InfiniBand.
        heads: Show the memory with a KV head for each query head, and with a single one.
        json: Print JSON instead of tables.
    """
    if prices is not None and hardware is None:
        raise ConfigError("prices has no effect without hardware: name a GPU, such as h100")
    if seats is not None and not 1 <= seats <= MAX_SEATS:
        raise ConfigError(f"seats must be in [1, {MAX_SEATS}], got {seats}")
    device = None if hardware is None else hardware_preset(hardware)
    table = None if device is None else read_prices(prices)
    if table is not None and device is not None:
        table.of(device.name)
    memory_bytes = 80 * GIB if device is None else device.memory_bytes
    if gpu_memory_gib is not None:
        memory_bytes = _bytes_of(gpu_memory_gib)
    if dtype != "auto" and quantization is not None:
        raise ConfigError("give either dtype or quantization, and not both")
    if draft is not None and head is not None:
        raise ConfigError("give either draft or head, and not both")
    known = PluginRegistry().known_kinds()
    sizes, draft_memory = read_sizes(model, known), None
    if draft is not None:
        draft_memory = memory_of_model(draft, sizes)
    elif head is not None:
        draft_memory = memory_of_head(head, sizes)
    found = capacity_of(
        model,
        sizes,
        dtype=dtype,
        weights=None if dtype != "auto" else read_weights(model, quantization, known),
        kv_dtype=kv_dtype,
        contexts=[tokens_of(text) for text in context],
        gpu_memory_bytes=memory_bytes,
        num_gpus=num_gpus,
        memory_utilization=memory_utilization,
        page_size=page_size,
        draft=draft_memory,
    )
    more = _Figures(
        hardware="" if device is None else device.name,
        serving=_serving(model, sizes, found, device, table),
        prices=table,
        tokens_per_seat=None if seats is None else found.capacity_tokens / seats,
        transfers=transfer_rows(found) if transfers else None,
        heads=heads_rows(found, sizes) if heads else None,
    )
    if json:
        print(json_text(msgspec.to_builtins(found) | msgspec.to_builtins(more)))
    else:
        _print_tables(found)
        _print_figures(found, more)


class _Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures that options ask for."""

    hardware: str = ""
    """Name of the GPU that speeds and prices are about."""
    serving: list[ServingRow] | None = None
    prices: Prices | None = None
    tokens_per_seat: float | None = None
    transfers: list[TransferRow] | None = None
    heads: list[HeadsRow] | None = None


def _bytes_of(gpu_memory_gib: float) -> int:
    if not 0 < gpu_memory_gib <= MAX_GPU_MEMORY_GIB:
        raise ConfigError(
            f"gpu_memory_gib must be a number above 0 and at most {MAX_GPU_MEMORY_GIB}, "
            f"got {gpu_memory_gib}"
        )
    return math.ceil(gpu_memory_gib * GIB)


def _serving(
    model: str,
    sizes: ModelSizes,
    found: Capacity,
    device: Hardware | None,
    prices: Prices | None,
) -> list[ServingRow] | None:
    if device is None or prices is None:
        return None
    shape = ModelShape.of(read_model(model))
    if found.weights is None:
        shape = shape_in(shape, sizes.parameters, found.dtype, found.kv_dtype)
    else:
        memory = found.weights.on(device.name == "cpu")
        shape = shape.with_weight_bytes(memory.step_bytes, memory.expert_bytes)
        shape = msgspec.structs.replace(shape, kv_format=COUNTED_KV_FORMATS[found.kv_dtype])
    return serving_rows(found, shape, device, prices.of(device.name))


def _print_figures(found: Capacity, more: _Figures) -> None:
    from aioserve.cli._console import plain_console
    from aioserve.cli._serving_tables import (
        heads_table,
        price_note,
        serving_table,
        transfer_table,
    )

    console = plain_console(highlight=False)
    contexts = [row.context_tokens for row in found.contexts]
    if more.tokens_per_seat is not None:
        console.print(f"\naverage tokens a seat: {more.tokens_per_seat:,.0f}")
    if more.serving is not None and more.prices is not None:
        console.print()
        console.print(serving_table(more.serving, more.prices.currency))
        console.print(f"\n{price_note(more.prices, more.hardware, found.num_gpus)}", soft_wrap=True)
    if more.transfers is not None:
        console.print()
        console.print(transfer_table(more.transfers))
    if more.heads is not None:
        console.print()
        if more.heads:
            console.print(heads_table(more.heads, contexts))
        else:
            console.print("Latent attention has no KV heads to choose.")


def tokens_of(text: str) -> int:
    """Return 4096, "4K" or "4k" as a count of tokens; K is 1,024. Raises `ConfigError`."""
    digits = text[:-1] if text[-1:] in ("K", "k") else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 12:
        raise ConfigError(f"context must be a count of tokens such as 4096 or 4K, got {text!r}")
    return int(digits) * (1 if digits == text else 1024)


def _print_tables(found: Capacity) -> None:
    from aioserve.cli._console import plain_console

    console = plain_console(highlight=False)
    gpus = counted(found.num_gpus, "GPU")
    parameters = f"{_parameters(found.num_parameters)} parameters"
    if found.num_active_parameters < found.num_parameters:
        parameters += f" ({_parameters(found.num_active_parameters)} for a token)"
    weights = found.weights
    quantised = weights is not None and weights.are_quantised
    precision = found.dtype
    if weights is not None and quantised:
        precision = ", ".join(one.format for one in weights.on_cpu.formats)
    console.print(
        f"{found.model}: {parameters} in {precision}, "
        f"KV in {found.kv_dtype}, {gpus} of {_size(found.gpu_memory_bytes)}\n",
        soft_wrap=True,
    )
    if weights is not None and quantised:
        console.print(_formats(weights))
        console.print()
    console.print(_memory(found))
    console.print()
    console.print(_requests(found))
    if trouble := _trouble(found):
        console.print(f"\n{trouble}", soft_wrap=True)
    if found.refused:
        console.print(
            f"\nThe sizes are those that its config.json tells; this version of aioserve doesn't "
            f"load the model: {found.refused}",
            soft_wrap=True,
        )


def _formats(weights: ModelWeights) -> Table:
    """Return a table of weights by format: an engine may hold a format differently than files
    do.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("weights in")
    for column in ("tensors", "parameters", "in files", "on a CPU", "on a GPU"):
        table.add_column(column, justify="right")
    on_gpu = weights.on_gpu.by_format()
    for one in weights.on_cpu.formats:
        table.add_row(
            one.format,
            f"{one.tensors:,}",
            f"{one.parameters:,}",
            _size(one.file_bytes),
            _size(one.held_bytes),
            _size(on_gpu[one.format]),
        )
    return table


def _memory(found: Capacity) -> Table:
    from rich.table import Table

    several = found.num_gpus > 1
    table = Table(box=None, pad_edge=False, show_header=several)
    table.add_column("")
    table.add_column("in all", justify="right")
    if several:
        table.add_column("per GPU", justify="right")
    rows = [
        ("weights", found.weight_bytes_per_gpu, found.weight_bytes),
        ("KV per token", found.kv_bytes_per_token_per_gpu, found.kv_bytes_per_token),
        (
            f"page of {counted(found.page_size, 'token')}",
            found.page_bytes_per_gpu,
            found.page_bytes_per_gpu * found.num_gpus,
        ),
        (
            counted(found.num_pages, "page", form=","),
            found.page_bytes_per_gpu * found.num_pages,
            found.page_bytes_per_gpu * found.num_pages * found.num_gpus,
        ),
    ]
    if (draft := found.draft) is not None:
        beside = draft.bytes_per_page(found.page_size, found.num_gpus)
        what = "draft" if draft.kind == "model" else f"{draft.kind} head"
        for name, each in (
            (f"weights of the {what}", draft.weight_bytes_on(found.num_gpus)),
            (f"{what} beside a page", beside),
            (f"{what} beside all pages", beside * found.num_pages),
        ):
            rows.append((name, each, each * found.num_gpus))
    for name, each, total in rows:
        table.add_row(name, _size(total), *([_size(each)] if several else []))
    return table


def _requests(found: Capacity) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("context", "KV per request", "pages", "requests at once"):
        table.add_column(column, justify="right")
    for row in found.contexts:
        table.add_row(
            f"{row.context_tokens:,}",
            _size(row.kv_bytes_per_request, like=found.contexts[-1].kv_bytes_per_request),
            f"{row.pages_per_request:,}",
            f"{row.concurrent_requests:,}",
        )
    return table


def _trouble(found: Capacity) -> str:
    """Return why the last context fits no request, and what would help; empty if one fits."""
    if found.contexts[-1].concurrent_requests:
        return ""
    longest = f"a request of {counted(found.contexts[-1].context_tokens, 'token', form=',')}"
    what = f"The weights leave no room for {longest}."
    if not found.weights_fit:
        held = found.weight_bytes_per_gpu
        if found.draft is not None:
            held += found.draft.weight_bytes_on(found.num_gpus)
        what = f"The weights don't fit: {_size(held)} per GPU."
    if found.fewest_gpus is None:
        return f"{what} No number of these GPUs that divides its heads holds {longest}."
    return f"{what} {found.fewest_gpus} of these GPUs would hold them and {longest}."


def _parameters(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 10**9 else f"{count / 1e6:,.1f} million"


def _size(count: int, *, like: int | None = None) -> str:
    """Return a size in the largest unit that fits into `count`, or into `like` if it is given."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if (count if like is None else like) >= unit:
            return f"{count / unit:,.2f} {name}"
    return counted(count, "byte")
