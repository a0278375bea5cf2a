"""Work for the engines of `gpu.py`: models with random weights, and requests of random tokens.

It is the same for every engine: token ids come from a seed. An answer has as many tokens as its
request says, whatever the model makes of them.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioserve.cli._models import COMMON, SHAPES

__all__ = ["SCALES", "Request", "Scale", "model_directory", "vocab_size_of"]

MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": COMMON | SHAPES["0.6b"],
    "8b": COMMON
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    },
    "tiny": COMMON
    | {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 300,
    },
    "tiny-untied": COMMON
    | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 300,
        "tie_word_embeddings": False,
    },
}
"""Shapes by name, as in config.json. The shapes 0.6b and 8b are those of Qwen3."""


@dataclass(frozen=True)
class Request:
    """Random token ids, and the length of the answer."""

    prompt: list[int]
    output_tokens: int
    due_seconds: float = 0.0
    """Time when it is sent, from the start of the run."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the workloads, all in tokens and requests."""

    shape: str
    large_shape: str
    """Shape of the parts `8b-...`."""
    requests: int
    large_requests: int
    lengths: tuple[int, int]
    """Least and largest length of prompts and of answers, uniform."""
    single_prompt: int
    single_output: int
    long_prompt: int
    shared_requests: int
    shared_prompt: int
    own_prompt: int
    shared_output: int
    online_requests: tuple[int, int]
    """Least and largest number of requests."""
    online_seconds: float
    max_model_len: int

    def offline(self, vocab_size: int, seed: int, requests: int | None = None) -> list[Request]:
        """Return requests that come all at once."""
        source = random.Random(f"offline {seed}")
        return [
            self._drawn(source, vocab_size)
            for _ in range(self.requests if requests is None else requests)
        ]

    def single(self, vocab_size: int, seed: int) -> list[Request]:
        source = random.Random(f"single {seed}")
        return [Request(_ids(source, vocab_size, self.single_prompt), self.single_output)]

    def long(self, vocab_size: int, seed: int) -> list[Request]:
        """Return one long prompt, answered with one token."""
        source = random.Random(f"long {seed}")
        return [Request(_ids(source, vocab_size, self.long_prompt), 1)]

    def prefixed(self, vocab_size: int, seed: int, *, shared: bool) -> list[Request]:
        """Return prompts that begin alike, or as long ones that don't."""
        source = random.Random(f"prefixed {seed} {shared}")
        prefix = _ids(source, vocab_size, self.shared_prompt)
        return [
            Request(
                (prefix if shared else _ids(source, vocab_size, self.shared_prompt))
                + _ids(source, vocab_size, self.own_prompt),
                self.shared_output,
            )
            for _ in range(self.shared_requests)
        ]

    def online(self, vocab_size: int, seed: int, rate: float) -> list[Request]:
        """Return `rate` requests a second, at random times (a Poisson process)."""
        source = random.Random(f"online {seed}")
        least, most = self.online_requests
        due, found = 0.0, []
        for _ in range(min(most, max(least, round(rate * self.online_seconds)))):
            due += source.expovariate(rate)
            drawn = self._drawn(source, vocab_size)
            found.append(Request(drawn.prompt, drawn.output_tokens, due))
        return found

    def warm_up(self, vocab_size: int) -> list[Request]:
        """Return few tokens of each kind: long prompts, short ones beside answers, answers
        alone.
        """
        source = random.Random("warm-up")
        return [
            Request(_ids(source, vocab_size, length), min(16, self.single_output))
            for length in (self.long_prompt, *self.lengths, self.single_prompt)
        ]

    def _drawn(self, source: random.Random, vocab_size: int) -> Request:
        prompt = _ids(source, vocab_size, source.randint(*self.lengths))
        return Request(prompt, source.randint(*self.lengths))


SCALES = {
    "0.6b": Scale(
        shape="0.6b",
        large_shape="8b",
        requests=256,
        large_requests=64,
        lengths=(100, 1024),
        single_prompt=128,
        single_output=512,
        long_prompt=4096,
        shared_requests=64,
        shared_prompt=2048,
        own_prompt=64,
        shared_output=64,
        online_requests=(32, 512),
        online_seconds=10.0,
        max_model_len=8192,
    ),
    "tiny": Scale(
        shape="tiny",
        large_shape="tiny-untied",
        requests=6,
        large_requests=3,
        lengths=(3, 9),
        single_prompt=4,
        single_output=6,
        long_prompt=40,
        shared_requests=4,
        shared_prompt=32,
        own_prompt=3,
        shared_output=3,
        online_requests=(3, 6),
        online_seconds=0.1,
        max_model_len=96,
    ),
}
"""Scales by the option `--shape`. The scale tiny is for trying the benchmark, on any machine."""


def vocab_size_of(shape: str) -> int:
    return MODEL_SHAPES[shape]["vocab_size"]


def model_directory(folder: Path, shape: str, dtype: str, device: str) -> Path:
    """Return the directory of a model of that shape, written if it isn't there.

    Weights are drawn on `device`.
    """
    directory = folder / shape
    if not directory.is_dir():
        from aioserve.testing.random_model import write_random_model

        # Written beside and renamed: a process that is killed meanwhile leaves no half model.
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            written = write_random_model(
                Path(temporary) / "model", MODEL_SHAPES[shape], dtype=dtype, device=device
            )
            shutil.move(written, directory)
    return directory


def _ids(source: random.Random, vocab_size: int, count: int) -> list[int]:
    return [source.randrange(vocab_size) for _ in range(count)]
