"""Batches over latent pages for the tests of ops: those of `scenarios`, with keys as latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aioserve.ops import Backend, Batch, KVCache, KVShape
from aioserve.ops.backend import AttentionKind, KVLayer, RMSNorm, Rotation
from tests.ops.scenarios import Heads, Scenario, lay_out, one_group, random


@dataclass(slots=True, frozen=True)
class Latents:
    """Sizes of a token's latent, and the number of query heads that read it."""

    q_heads: int
    rank: int
    rotated: int

    @property
    def dim(self) -> int:
        return self.rank + self.rotated

    def shape(self, num_pages: int, page_size: int, dtype: torch.dtype) -> KVShape:
        """Return the shape of pages of two layers. Tests use the second one."""
        layout = one_group(2, 1, self.dim, dtype, latent=True)
        return KVShape(layout, num_pages, page_size, self.rank)


@dataclass(slots=True, frozen=True)
class Step:
    queries: Tensor
    """Queries [T, Hq * D]."""
    batch: Batch
    kv: KVCache

    @property
    def at(self) -> KVLayer:
        return KVLayer(self.batch, self.kv, 1)

    def attend(self, backend: Backend, scale: float, *, logit_rows_only: bool = False) -> Tensor:
        kind = AttentionKind(scale)
        return backend.paged_attention(self.queries, self.at, kind, logit_rows_only=logit_rows_only)


def rows_of(kv: KVCache) -> Tensor:
    """View the rows of the second layer: [num_pages, page_size, D]."""
    return padded_rows(kv, 1)[..., : kv.head_dim]


def padded_rows(kv: KVCache, layer: int) -> Tensor:
    """View the rows of a layer, with the padding to whole steps."""
    return kv.storage[:, layer].view(kv.num_pages, kv.page_size, -1)


def scene(
    sequences: Sequence[tuple[int, int, int]],
    latents: Latents,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Scenario:
    heads = Heads(latents.q_heads, 1, latents.dim)
    return lay_out(sequences, heads, page_size=page_size, dtype=dtype, seed=seed)


def on(backend: Backend, scenario: Scenario, latents: Latents, *, wide: bool = False) -> Step:
    """Copy a scenario to a backend; with `wide`, in float64, for an exact reference."""
    dtype = torch.float64 if wide else scenario.storage.dtype
    kv = backend.allocate_kv(latents.shape(scenario.num_pages, scenario.page_size, dtype))
    kv.storage.fill_(float("nan"))
    padded_rows(kv, 1)[..., kv.head_dim :] = 0  # padding is written as zeros
    rows_of(kv).copy_(scenario.storage[0, 0, :, 0])
    batch = backend.prepare(scenario.host, kv, backend.allocate_slots(1))
    queries = scenario.q.to(dtype, copy=True).flatten(1)
    return Step(backend.place(queries), batch, kv)


def angles(half: int, positions: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw cosines and sines of a rotation, `[positions, half]` each."""
    turns = random(positions, half, seed=seed)
    return turns.cos(), turns.sin()


def check_writes(
    backend: Backend, latents: Latents, dtype: torch.dtype, *, interleaved: bool
) -> None:
    """Compare written entries with float64, and check that all others are unchanged."""
    sequences = [(2, 1, 40), (1, 5, 5), (3, 7, 20)]
    scenario = scene(sequences, latents, page_size=8, dtype=dtype)
    scenario.host.positions[:] += 7  # 7 entries were dropped
    step, tokens = on(backend, scenario, latents), len(scenario.q)
    before, rank, rotated = rows_of(step.kv).clone(), latents.rank, latents.rotated
    half = rotated // 2  # the last of an odd number isn't rotated
    written = random(tokens, 2 * latents.dim, dtype=dtype, seed=8)[:, : latents.dim]  # rows apart
    weight = random(rank, dtype=dtype, seed=9)
    cos, sin = angles(half, 64, seed=10)
    queries = step.queries.cpu().clone()

    place = backend.place
    rotation = Rotation(place(cos), place(sin), interleaved)
    backend.latent_write(
        step.queries, place(written), step.at, rotation, RMSNorm(place(weight), 1e-6)
    )

    at = torch.from_numpy(scenario.host.positions).long()

    def turned(x: Tensor) -> Tensor:
        """Rotate x [T, H, rotated] in float64."""
        x, rest = x[..., : 2 * half], x[..., 2 * half :]
        c, s = cos[at].double()[:, None], sin[at].double()[:, None]
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        pairs = first * c - second * s, second * c + first * s
        moved = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
        return torch.cat([moved, rest], -1)

    limit = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    heads = queries.unflatten(1, (-1, latents.dim)).double()
    expected = torch.cat([heads[..., :rank], turned(heads[..., rank:])], -1).flatten(1)
    torch.testing.assert_close(step.queries.cpu().double(), expected, rtol=limit, atol=limit)
    plain = written[:, :rank].double()
    normed = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    key = turned(written[:, None, rank:].double())[:, 0]
    rows, was = (x.cpu().flatten(0, 1) for x in (rows_of(step.kv), before))
    locations = torch.from_numpy(scenario.host.token_locations)[0]
    row = torch.cat([normed, key], -1)
    torch.testing.assert_close(rows[locations].double(), row, rtol=limit, atol=limit)
    others = torch.ones(len(rows), dtype=torch.bool)
    others[locations] = False
    assert torch.equal(rows[others].view(torch.uint8), was[others].view(torch.uint8))
