"""Measure the cost of a draft token beside a step of pyhelp, on this machine's CPU.

Usage: python tools/pyhelp/cost.py MODEL_DIR --draft DRAFT_DIR --eagle HEAD_DIR

Times are medians of one forward pass at a context of 100 tokens, without planning and drawing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from aioserve.models.decoder import Decoder
from aioserve.models.heads.eagle3 import Eagle3Head
from aioserve.models.heads.loader import load_head
from aioserve.models.loader import load_model
from aioserve.ops import Backend, Batch, HostBatch, KVCache, backend_named

CONTEXT, PAGES, PAGE_SIZE = 100, 64, 16
PASSES = 300
ROWS = (1, 2, 3, 5, 9)


def batch_of(backend: Backend, cache: KVCache, rows: int) -> Batch:
    """Return a batch of the last ``rows`` tokens of one context, with logits of each."""
    table = np.arange(PAGES, dtype=np.int32).reshape(1, 1, PAGES)
    counts, contexts = np.array([rows]), np.array([CONTEXT])
    host = HostBatch.laid_out(counts, contexts, table, PAGE_SIZE, logit_rows=range(rows))
    host = replace(host, token_ids=np.arange(rows) + 100)
    return backend.prepare(host, cache, backend.allocate_slots(1))


def microseconds(compute: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(PASSES):
        began = time.perf_counter()
        compute()
        times.append(time.perf_counter() - began)
    return statistics.median(times[PASSES // 10 :]) * 1e6


def cost_of_model(model: Decoder, rows: int) -> float:
    """Return the time of one pass of a model."""
    cache = model.new_cache(PAGES, PAGE_SIZE)
    batch = batch_of(model.backend, cache, rows)
    return microseconds(lambda: model.forward(batch, cache))


def cost_of_head(head: Eagle3Head, backend: Backend) -> float:
    """Return the time of one draft token of a head that reads its own hidden state."""
    cache = head.new_cache(PAGES, PAGE_SIZE)
    batch = batch_of(backend, cache, 1)
    hidden = torch.zeros(1, head.config.hidden_size, dtype=head.dtype)
    return microseconds(lambda: head.forward(hidden, batch, cache, fuses=False))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="pyhelp's directory")
    parser.add_argument("--draft", type=Path, help="the directory of a small model")
    parser.add_argument("--eagle", type=Path, help="the directory of a head")
    options = parser.parse_args()
    backend = backend_named("native")
    target = load_model(options.model, backend=backend)
    steps = {rows: cost_of_model(target, rows) for rows in ROWS}
    for rows, took in steps.items():
        print(f"pyhelp, {rows} rows: {took:.0f} us, {took / steps[1]:.2f} of one row")
    draft_costs = {}
    if options.draft:
        draft = load_model(options.draft, backend=backend)
        draft_costs["model"] = cost_of_model(draft, 1)
    if options.eagle:
        head = load_head(options.eagle, target)
        if not isinstance(head, Eagle3Head):
            raise SystemExit(f"{options.eagle} is no EAGLE-3 head")
        draft_costs["eagle"] = cost_of_head(head, backend)
    for name, took in draft_costs.items():
        print(f"{name}, a draft token: {took:.0f} us, {took / steps[1]:.2f} of a step")


if __name__ == "__main__":
    main()
