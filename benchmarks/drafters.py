"""Measures what drafters cost a step, by the length and the number of sequences.

    python benchmarks/drafters.py [--contexts 1024 8192 32768] [--slots 1 8 32] [--json FILE]

Prompts are sources of the standard library, for each slot from another file on, in the tokens of
the embedded model. A step extends all slots by a token, the next one of the text, and asks for
`--limit` tokens each. After each 32nd step one slot ends and starts again, with the next part of
the text as its prompt.

Printed for each drafter and size, in processor time, are the median and the 99th percentile over
the steps, in microseconds per slot. In milliseconds come the medians for the start and the end of a
sequence. Beside these are bytes per known token, and tokens drafted per slot and step.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aioserve.assets import model_path
from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.drafting.ngram import NgramDrafter
from aioserve.drafting.suffix import SuffixDrafter
from aioserve.text.tokenizer import Tokenizer

DRAFTERS: dict[str, Callable[[], NgramDrafter | SuffixDrafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}
STEPS_PER_LIFE = 32


@dataclass(frozen=True)
class Row:
    drafter: str
    context: int
    """Tokens of a sequence when it starts."""
    slots: int
    step_us: float
    """Median of a step, per slot."""
    step_p99_us: float
    start_ms: float
    end_ms: float
    bytes_per_token: float
    """Memory of the sequences alone: before any has ended."""
    drafted: float
    """Tokens per slot and step."""


def embedded_tokenizer() -> Tokenizer:
    path = model_path("pyhelp")
    if path is None:
        raise SystemExit("the embedded model isn't there")
    return Tokenizer.from_directory(path)


def source_tokens(tokenizer: Tokenizer, count: int) -> npt.NDArray[np.int32]:
    """Return the first `count` tokens of the standard library, which repeats if it is too short."""
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"))
        if len(ids) >= count:
            break
    return np.resize(np.array(ids, np.int32), count)


class Lives:
    """Slots of a drafter, each further on in a text than the one before."""

    def __init__(self, drafter: Drafter, text: npt.NDArray[np.int32], context: int) -> None:
        self._drafter = drafter
        self._text = text
        self._context = context
        self._places: dict[int, int] = {}
        self._next = 0
        self.start_seconds: list[float] = []
        self.end_seconds: list[float] = []

    def start(self, slot: int) -> None:
        first = self._next % (len(self._text) - self._context - 1)
        self._next += self._context // 2
        known = self._text[first : first + self._context]
        began = time.thread_time()
        self._drafter.start(slot, DraftedSequence(known_ids=known, prompt_tokens=len(known)))
        self.start_seconds.append(time.thread_time() - began)
        self._places[slot] = first + self._context

    def end(self, slot: int) -> None:
        began = time.thread_time()
        self._drafter.end(slot)
        self.end_seconds.append(time.thread_time() - began)

    def next_tokens(self, slots: list[int]) -> list[list[int]]:
        tokens = [[int(self._text[self._places[slot] % len(self._text)])] for slot in slots]
        for slot in slots:
            self._places[slot] += 1
        return tokens


def measure(
    name: str, text: npt.NDArray[np.int32], context: int, num_slots: int, steps: int, limit: int
) -> Row:
    drafter = DRAFTERS[name]()
    lives = Lives(drafter, text, context)
    slots = list(range(num_slots))
    for slot in slots:
        lives.start(slot)
    bytes_per_token = drafter.num_bytes / (context * num_slots)
    limits = [limit] * num_slots
    seconds: list[float] = []
    drafted = 0
    for step in range(steps):
        tokens = lives.next_tokens(slots)
        began = time.thread_time()
        drafter.extend_all(slots, tokens)
        drafts = drafter.draft_all(slots, limits)
        seconds.append(time.thread_time() - began)
        drafted += sum(map(len, drafts))
        if step % STEPS_PER_LIFE == STEPS_PER_LIFE - 1:
            slot = slots[step // STEPS_PER_LIFE % num_slots]
            lives.end(slot)
            lives.start(slot)
    each = np.array(seconds) / num_slots * 1e6
    return Row(
        drafter=name,
        context=context,
        slots=num_slots,
        step_us=float(np.median(each)),
        step_p99_us=float(np.percentile(each, 99)),
        start_ms=float(np.median(lives.start_seconds)) * 1e3,
        end_ms=float(np.median(lives.end_seconds or [0.0])) * 1e3,
        bytes_per_token=bytes_per_token,
        drafted=drafted / steps / num_slots,
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    tokenizer = embedded_tokenizer()
    text = source_tokens(tokenizer, 4 * max(options.contexts) + options.steps)
    for name in DRAFTERS:
        for context in options.contexts:
            for num_slots in options.slots:
                yield measure(name, text, context, num_slots, options.steps, options.limit)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{'drafter':<8} {'context':>7} {'slots':>5} {'step, us':>8} {'p99, us':>8} "
        f"{'start, ms':>9} {'end, ms':>8} {'bytes/token':>11} {'drafted':>7}"
    )
    measured = []
    for row in rows(options):
        measured.append(asdict(row))
        print(
            f"{row.drafter:<8} {row.context:>7} {row.slots:>5} {row.step_us:>8.2f} "
            f"{row.step_p99_us:>8.2f} {row.start_ms:>9.2f} {row.end_ms:>8.3f} "
            f"{row.bytes_per_token:>11.0f} {row.drafted:>7.2f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
