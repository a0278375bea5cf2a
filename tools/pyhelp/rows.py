"""Texts of pyhelp as training batches: rows of tokens with their hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

POOL_BATCHES = 16
TURN_START_ID = 1
CODE_SHARE = 0.3
"""Share of the code that a pass has."""
_WIDE = {np.dtype(np.float16): np.float32, np.dtype(np.int16): np.int64}


def divergence(logits: torch.Tensor, shares: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """Return the mean divergence, in nats, of a draft's logits [n, vocab] from pyhelp's.

    It is over pyhelp's likeliest tokens: their probabilities ``shares`` and ids ``tops``, [n, top].
    """
    ours = logits.float().log_softmax(-1).gather(1, tops)
    return (shares * (shares.clamp_min(1e-8).log() - ours)).sum(-1).mean()


@dataclass(frozen=True)
class Rows:
    """Texts side by side, padded after their ends."""

    ids: torch.Tensor
    """int64 [rows, width]."""
    chosen: torch.Tensor
    """bool [rows, width]: True if pyhelp chose the token; False in the padding."""
    features: torch.Tensor
    """float32 [rows, width, 3 * hidden]: input of a head."""
    shares: torch.Tensor
    """float32 [rows, width, top]: probabilities of the likeliest next tokens."""
    tops: torch.Tensor
    """int64 [rows, width, top]: ids of these tokens."""


class Spoken:
    """One file that ``speech.py`` wrote."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self._tokens = arrays["tokens"].astype(np.int64)
            self._chosen = arrays["chosen"]
            self._features = arrays["features"]
            self._shares = arrays["shares"]
            self._tops = arrays["tops"]
            self.lengths: list[int] = arrays["lengths"].tolist()
            self.greedy: list[bool] = arrays["greedy"].tolist()
        self._starts = np.concatenate(([0], np.cumsum(self.lengths))).tolist()

    def rows(self, indices: list[int], *, features: bool = True) -> Rows:
        """Return some texts. Without ``features`` those are empty."""
        width = max(self.lengths[index] for index in indices)

        def padded(array: np.ndarray) -> torch.Tensor:
            shape = (len(indices), width, *array.shape[1:])
            whole = np.zeros(shape, _WIDE.get(array.dtype, array.dtype))
            for row, index in enumerate(indices):
                start, end = self._starts[index : index + 2]
                whole[row, : end - start] = array[start:end]
            return torch.from_numpy(whole)

        none = torch.empty(len(indices), width, 0)
        return Rows(
            padded(self._tokens),
            padded(self._chosen),
            padded(self._features) if features else none,
            padded(self._shares),
            padded(self._tops),
        )

    def batches(self, num_tokens: int, seed: int, *, features: bool = True) -> Iterator[Rows]:
        """Yield batches of at most ``num_tokens``, padding included, for ever.

        Each pass has all chats and some of the code, other ones each time.
        """
        random = np.random.default_rng(seed)
        is_chat = self._tokens[self._starts[:-1]] == TURN_START_ID
        while True:
            ready: list[list[int]] = []
            taken = is_chat | (random.random(len(is_chat)) < CODE_SHARE)
            order = random.permutation(np.flatnonzero(taken)).tolist()
            pool = num_tokens * POOL_BATCHES
            sizes = np.cumsum([self.lengths[index] for index in order]) // pool
            for part in range(int(sizes[-1]) + 1):
                alike = [index for index, at in zip(order, sizes, strict=True) if at == part]
                alike.sort(key=self.lengths.__getitem__)
                batch: list[int] = []
                for index in alike:
                    if batch and (len(batch) + 1) * self.lengths[index] > num_tokens:
                        ready.append(batch)
                        batch = []
                    batch.append(index)
                ready.append(batch)
            for index in random.permutation(len(ready)).tolist():
                if ready[index]:
                    yield self.rows(ready[index], features=features)
