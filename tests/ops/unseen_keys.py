"""Steps with NaN or infinity in the keys and values of a few tokens, for the tests of ops.

Rows that attend to a broken token have no finite result. All others have the result that they have
without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aioserve.ops import Backend, HostBatch
from aioserve.ops.backend import AttentionKind, HeadNorms, RMSNorm, Rotation
from tests.ops.latent_scenes import Latents, angles, on
from tests.ops.scenarios import Scenario, random

NAN, INFINITY = float("nan"), float("inf")
# There is a decode, and chunks at the front, in and across key blocks and splits of keys.
MIXED = [(1, 1, 30), (2, 70, 70), (3, 9, 129), (4, 33, 540), (5, 2, 2), (6, 5, 64)]


@dataclass(frozen=True, slots=True)
class Broken:
    """Token at position `at` of sequence `row`, which the step computes.

    `number` replaces a number in its key, its value, or both."""

    row: int
    at: int
    number: float = NAN
    keys: bool = True
    values: bool = True


# There are first, middle and last tokens of chunks, and two tokens of one sequence.
BROKEN = [
    Broken(1, 33),
    Broken(1, 50, INFINITY, keys=False),
    Broken(2, 120),
    Broken(3, 511, keys=False),
    Broken(3, 539, INFINITY),
    Broken(4, 1, values=False),
    Broken(5, 62, -INFINITY, keys=False),
]
Write = Callable[[Sequence[Broken]], Tensor]
"""Function from broken tokens to attention `[T, Hq, D]`, after keys and values are written."""


def check(attend: Write, host: HostBatch, tokens: Sequence[Broken], window: int = 0) -> None:
    """Compare with a step that has none of the broken `tokens`."""
    sees = torch.zeros(len(host.positions), dtype=torch.bool)
    for token in tokens:
        begin, end = host.query_start[token.row : token.row + 2].tolist()
        ahead = torch.from_numpy(host.positions[begin:end]) - token.at
        sees[begin:end] |= (ahead >= 0) & (ahead < (window or host.max_context))
    assert 0 < int(sees.sum()) < len(sees)
    expected, got = attend(()), attend(tokens)
    assert bool(expected.isfinite().all())
    assert torch.equal(got[~sees], expected[~sees])
    assert not bool(got[sees].isfinite().all(-1).any())


def row_of(host: HostBatch, token: Broken) -> int:
    own = range(*host.query_start[token.row : token.row + 2].tolist())
    (row,) = [row for row in own if host.positions[row] == token.at]
    return row


def check_plain(
    backend: Backend,
    scenario: Scenario,
    tokens: Sequence[Broken] = BROKEN,
    *,
    rows_only: bool = False,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
    **options: Any,
) -> None:
    """Check attention over keys and values. `options` are those of `AttentionKind`."""
    host, heads = scenario.host, scenario.q.shape[1]
    at = torch.from_numpy(host.token_locations[0])
    pages, offsets = at // scenario.page_size, at % scenario.page_size

    def attend(tokens: Sequence[Broken]) -> Tensor:
        keys, values = scenario.storage[0][:, pages, :, offsets].clone().unbind(1)
        for token in tokens:
            row = row_of(host, token)
            if token.keys:
                keys[row, :, 1] = token.number
            if token.values:
                values[row, :, 1] = token.number
        step = scenario.on(backend, qkv=torch.cat([scenario.q, keys, values], dim=1))
        qkv = backend.place(step.qkv)
        backend.rotary_kv_write(qkv, step.at, rotation, norms)
        kind = AttentionKind(step.kv.head_dim**-0.5, **options)
        attended = backend.paged_attention(qkv, step.at, kind, logit_rows_only=rows_only)
        return attended.cpu().unflatten(1, (heads, -1))

    check(attend, host, tokens, options.get("window", 0))


def check_latent(
    backend: Backend, scenario: Scenario, latents: Latents, tokens: Sequence[Broken] = BROKEN
) -> None:
    """Check attention over latents. Broken `keys` are in the rotated part, which isn't a value."""
    host, rank = scenario.host, latents.rank
    written = random(len(host.positions), latents.dim, dtype=scenario.storage.dtype, seed=8)
    cos, sin = angles(latents.rotated // 2, host.max_context, seed=10)
    weight = random(rank, dtype=scenario.storage.dtype, seed=9)

    def attend(tokens: Sequence[Broken]) -> Tensor:
        rows = written.clone()
        for token in tokens:
            row = row_of(host, token)
            if token.keys:
                rows[row, -1] = token.number
            if token.values:
                rows[row, rank - 1] = token.number
        step = on(backend, scenario, latents)
        place = backend.place
        rotation = Rotation(place(cos), place(sin))
        norm = RMSNorm(place(weight), 1e-6)
        backend.latent_write(step.queries, place(rows), step.at, rotation, norm)
        return step.attend(backend, latents.dim**-0.5).cpu().unflatten(1, (latents.q_heads, -1))

    check(attend, host, tokens)
