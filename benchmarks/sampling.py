"""Times draws of the native backend, and their share of a step.

    python benchmarks/sampling.py [--rows 32] [--threads 2] [--repeats 7] [--model random:0.6b]

    draw       milliseconds for a token of each row, from logits that are there: the median of
               the repeats
    of a step  that time / that of a greedy decode step of as many sequences, which the model
               computes in the same process; --model none leaves it out

Flat logits are normal with a deviation of 1, as a random model has them: most of the vocabulary may
be drawn. Peaked ones are as a trained model has them: a few tokens far above the others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from aioserve import _native
from aioserve.ops import HostBatch, SampleRows, backend_named
from aioserve.request import SamplingParams
from aioserve.sampling.sampler import SlotTable

NATIVE = backend_named("native")
CONTEXT, PAGE_SIZE = 256, 16
KINDS = {
    "temperature 1": SamplingParams(),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_p 0.95, T 0.7": SamplingParams(top_p=0.95, temperature=0.7),
    "top_k 50": SamplingParams(top_k=50),
    "top_k 20, top_p 0.95": SamplingParams(top_k=20, top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "typical_p 0.95": SamplingParams(typical_p=0.95),
}


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    _native.set_num_threads(options.threads)
    step = None
    vocab = options.vocab
    if options.model != "none":
        decode, vocab = decode_step(options.model, options.rows)
        step = median(options.repeats, decode)
    isa = _native.cpu_info()["isa"]
    print(f"{options.rows} rows of {vocab} logits, {options.threads} threads, {isa}")
    if step is not None:
        print(f"a greedy step of {options.model}: {1e3 * step:.1f} ms")
    print(f"{'logits':<8}{'':<22}{'draw':>8}{'of a step':>11}")
    for name, logits in (
        ("peaked", peaked(options.rows, vocab)),
        ("flat", flat(options.rows, vocab)),
    ):
        for kind, params in KINDS.items():
            took = median(options.repeats, native_draw(logits, params))
            share = "" if step is None else f"{100 * took / step:10.1f}%"
            print(f"{name:<8}{kind:<22}{1e3 * took:8.2f}{share}")


def flat(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


def peaked(rows: int, vocab: int) -> torch.Tensor:
    """Return logits that fall with the logarithm of the rank: probabilities follow a power law."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)]) + 1
    noise = torch.randn(rows, vocab, generator=generator)
    return 12 - 1.8 * ranks.log() + noise / 2


def rows_of(count: int, params: SamplingParams) -> SampleRows:
    slots = SlotTable(count)
    for slot in range(count):
        slots.start(slot, params, seed=slot)
    return slots.rows(range(count), [CONTEXT] * count)


def native_draw(logits: torch.Tensor, params: SamplingParams) -> Callable[[], object]:
    rows = rows_of(len(logits), params)
    slots = NATIVE.allocate_slots(len(logits))
    return lambda: NATIVE.draw(logits, rows, slots)


def decode_step(model: str, count: int) -> tuple[Callable[[], object], int]:
    """Return a greedy step of so many sequences, and the size of the vocabulary."""
    from aioserve.cli._models import model_or_random
    from aioserve.models.loader import load_model

    decoder = load_model(model_or_random(model), backend=NATIVE)
    pages = -(-CONTEXT // PAGE_SIZE)
    cache = decoder.new_cache(count * pages, PAGE_SIZE)
    table = np.arange(count * pages, dtype=np.int32).reshape(count, pages)
    each = np.arange(count, dtype=np.int64)
    host = HostBatch(
        token_ids=each,
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, CONTEXT, np.int32),
        page_table=table[None],
        token_locations=((each + 1) * pages * PAGE_SIZE - 1)[None],
        positions=np.full(count, CONTEXT - 1, np.int32),
        logit_rows=each,
        pending_rows=each[:0],
        pending_slots=each[:0],
    )
    slots, rows = NATIVE.allocate_slots(count), rows_of(count, SamplingParams(temperature=0))

    def step() -> None:
        decoder.draw(NATIVE.prepare(host, cache, slots), cache, rows, slots)

    return step, decoder.config.vocab_size


def median(repeats: int, call: Callable[[], object]) -> float:
    """Return the median in seconds, after one call that isn't counted."""
    call()
    taken: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936, help="where there is no model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", default="random:0.6b")
    return parser.parse_args()


if __name__ == "__main__":
    main()
