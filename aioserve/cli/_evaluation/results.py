"""Results of `aioserve evaluate`, as JSON and as tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from aioserve.arguments import counted
from aioserve.cli._evaluation.intervals import (
    BLOCKS,
    LEAST_TOKENS,
    LEVEL,
    Estimate,
    ratio_of_sums,
)
from aioserve.cli._evaluation.measuring import Measured
from aioserve.cli._streams import table_console
from aioserve.cli.doctor import compute_facts

__all__ = ["print_tables", "result_of"]


def result_of(measured: Measured, names: list[str], text: Path) -> dict[str, Any]:
    """Return the results, JSON-ready."""
    scored, windows = measured.scored, measured.windows
    places = np.concatenate([np.arange(one.scored, one.end) for one in windows])
    num_bytes, ones = measured.text.num_bytes[places], np.ones(len(places))
    result: dict[str, Any] = {
        "text": {
            "file": text.name,
            "tokens": len(measured.text.token_ids),
            "bytes": int(measured.text.num_bytes.sum()),
            "scored_tokens": len(places),
            "scored_bytes": int(num_bytes.sum()),
        },
        "windows": {
            "count": len(windows),
            "context": measured.context,
            "stride": measured.stride,
            "second_halves": measured.stride is None,
            "tokens_before": list(measured.text.before),
        },
        "interval": {
            "level": LEVEL,
            "method": "batch means",
            "blocks": BLOCKS if len(places) >= LEAST_TOKENS else None,
        },
        "machine": compute_facts(),
        "models": [],
    }
    for name, one, facts in zip(names, [scored, measured.reference], measured.facts, strict=False):
        if one is None:
            continue
        nats = ratio_of_sums(-one.logprobs, ones)
        bits = ratio_of_sums(-one.logprobs / math.log(2), num_bytes)
        result["models"].append(
            {
                "model": name,
                **{key: facts[key] for key in ("device", "dtype", "backend", "weight_bytes")},
                "perplexity": nats.map(_exp)._asdict(),
                "nats_per_token": nats._asdict(),
                "bits_per_byte": bits._asdict(),
                "seconds": one.seconds,
                "computed_tokens": one.num_computed,
                "computed_tokens_per_second": one.num_computed / one.seconds,
                "scored_tokens_per_second": len(places) / one.seconds,
            }
        )
    if measured.reference is not None and measured.divergence is not None:
        ratio = ratio_of_sums(measured.reference.logprobs - scored.logprobs, ones)
        kl_nats = measured.divergence.kl_nats
        same_top = ratio_of_sums(measured.divergence.same_top.astype(np.float64), ones)
        result["comparison"] = {
            "perplexity_ratio": ratio.map(_exp)._asdict(),
            "kl_nats_per_token": ratio_of_sums(kl_nats, ones).within(0, math.inf)._asdict(),
            "kl_nats_median": float(np.median(kl_nats)),
            "kl_nats_p99": float(np.percentile(kl_nats, 99)),
            "kl_nats_max": float(kl_nats.max()),
            "same_top_token": same_top.within(0, 1)._asdict(),
        }
    return result


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def print_tables(result: dict[str, Any]) -> None:
    from rich.table import Table

    console, text, windows = table_console(), result["text"], result["windows"]
    how = "the second half of each" if windows["second_halves"] else f"stride {windows['stride']}"
    console.print(
        f"{text['file']}: {text['scored_tokens']:,} of {counted(text['tokens'], 'token', form=',')}"
        f" scored, {counted(text['scored_bytes'], 'byte', form=',')}, "
        f"{counted(windows['count'], 'window', form=',')} of {windows['context']}, {how}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    named = ("model", "dtype", "weights")
    for column in (*named, "MB", "perplexity", "bits per byte", "nats per token", "tokens/s"):
        table.add_column(column, justify="left" if column in named else "right")
    for one in result["models"]:
        table.add_row(
            one["model"],
            one["dtype"],
            " ".join(one["weight_bytes"]),
            f"{sum(one['weight_bytes'].values()) / 1e6:,.1f}",
            _shown(one["perplexity"], 4),
            _shown(one["bits_per_byte"], 4),
            _shown(one["nats_per_token"], 4),
            f"{one['computed_tokens_per_second']:,.0f}",
        )
    console.print(table)
    if (found := result.get("comparison")) is not None:
        console.print(f"compared with {result['models'][1]['model']}:", soft_wrap=True)
        console.print(f"  ratio of perplexities  {_shown(found['perplexity_ratio'], 5)}")
        console.print(
            f"  KL divergence          {_shown(found['kl_nats_per_token'], 6)} nats per token "
            f"(median {found['kl_nats_median']:.6f}, p99 {found['kl_nats_p99']:.6f}, "
            f"max {found['kl_nats_max']:.6f})",
            soft_wrap=True,
        )
        console.print(f"  same most likely token {_shown(found['same_top_token'], 4)}")
    blocks = result["interval"]["blocks"]
    console.print(
        f"no intervals: they need {LEAST_TOKENS} scored tokens"
        if blocks is None
        else f"± is half of the {LEVEL:.0%} interval, from {blocks} blocks of the text",
        soft_wrap=True,
    )


def _shown(estimate: dict[str, float | None], digits: int) -> str:
    """Return a value, and how far it may be off."""
    one = Estimate(**estimate)  # pyright: ignore[reportArgumentType]
    if one.low is None or one.high is None:
        return f"{one.value:,.{digits}f}"
    return f"{one.value:,.{digits}f} ± {(one.high - one.low) / 2:,.{digits}f}"
