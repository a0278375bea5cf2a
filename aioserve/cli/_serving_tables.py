"""Tables of `aioserve plan` about speed, price, transfers and KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioserve.capacity.prices import Prices
from aioserve.capacity.serving import HeadsRow, ServingRow, TransferRow

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["heads_table", "price_note", "serving_table", "transfer_table"]

NONE = "-"
"""Cell of a context that fits no request."""


def serving_table(rows: Sequence[ServingRow], currency: str) -> Table:
    table = _table(
        "context",
        "batch",
        "ms a step",
        "tokens/s",
        f"{currency} a slot-hour",
        f"{currency} a million",
    )
    for row in rows:
        million = row.price_per_million_tokens
        table.add_row(
            f"{row.context_tokens:,}",
            f"{row.batch:,}",
            NONE if row.step_seconds is None else f"{1000 * row.step_seconds:,.1f}",
            NONE if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            NONE if row.price_per_slot_hour is None else f"{row.price_per_slot_hour:,.4f}",
            NONE if million is None else f"{million:,.3f}",
        )
    return table


def price_note(prices: Prices, hardware: str, num_gpus: int) -> str:
    """Return the price that the table goes by, and its date."""
    kind = "An example price, and no offer" if prices.is_example else "Price"
    each = f"{prices.of(hardware):g} {prices.currency} an hour for one {hardware}"
    return (
        f"{kind}: {each}, as of {prices.as_of}; {num_gpus} of them. Speeds are a roofline of "
        "decodes at the end of their contexts, without prefills."
    )


def transfer_table(rows: Sequence[TransferRow]) -> Table:
    contexts = sorted({row.context_tokens for row in rows})
    table = _table("KV of a request over", *[f"{tokens:,} tokens" for tokens in contexts])
    by_link: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.context_tokens):
        by_link.setdefault(row.link, []).append(f"{1000 * row.seconds:,.1f} ms")
    for link in dict.fromkeys(row.link for row in rows):
        table.add_row(link, *by_link[link])
    return table


def heads_table(rows: Sequence[HeadsRow], contexts: Sequence[int]) -> Table:
    table = _table("KV heads", "", "KV per token", *[f"at {tokens:,}" for tokens in contexts])
    for row in rows:
        table.add_row(
            f"{row.num_kv_heads} ({row.kind})",
            "its own" if row.is_own else "",
            f"{row.kv_bytes_per_token / 1024:,.1f} KiB",
            *[f"{count:,}" for count in row.concurrent_requests],
        )
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table
