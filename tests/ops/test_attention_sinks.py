"""Sinks of attention, its log-sum-exp, and the merge of attention over different keys."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aioserve import _native
from aioserve.ops import Backend, HostBatch
from aioserve.ops.backend import AttentionKind
from tests.ops.contents import contents, fill
from tests.ops.scenarios import (
    BACKENDS,
    DTYPES,
    NATIVE,
    REFERENCE,
    Heads,
    Scenario,
    Step,
    lay_out,
    random,
)
from tests.tiers import examples

# A lone token, a prefill, chunks across a key block and across a split of the keys, decodes.
MIXED = [
    *((1, 1, 1), (2, 70, 70), (3, 1, 65), (4, 33, 600), (5, 1, 700), (6, 5, 64)),
    *((7, 20, 140), (8, 3, 128), (9, 1, 1300)),
]
OPTIONS = [(0, 0.0), (33, 0.0), (130, 4.0), (0, 4.0)]
SINKS = ["20", "-20", "random"]
NOTHING = float("-inf")
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
windows = pytest.mark.parametrize(("window", "soft_cap"), OPTIONS)
every_sink = pytest.mark.parametrize("sinks", SINKS)


class Attended(NamedTuple):
    rows: Tensor
    """Attention [T, Hq, D]."""
    log_sum_exp: Tensor
    """Log-sum-exp, float32 [T, Hq]."""


def of_heads(sinks: str, heads: int) -> Tensor:
    return 3 * random(heads, seed=5) if sinks == "random" else torch.full((heads,), float(sinks))


def attend(
    step: Step,
    sinks: Tensor | None,
    backend: Backend = NATIVE,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    logit_rows_only: bool = False,
) -> Attended:
    kind = AttentionKind(step.kv.head_dim**-0.5, window, soft_cap, sinks)
    rows = (step.batch.logit_rows if logit_rows_only else step.qkv).shape[0]
    sums = torch.full((rows, step.q_size // step.kv.head_dim), float("nan"))
    attended = backend.paged_attention(
        step.qkv, step.at, kind, logit_rows_only=logit_rows_only, log_sum_exp=sums
    )
    return Attended(attended.unflatten(1, (-1, step.kv.head_dim)), sums)


class Exact(NamedTuple):
    """Attention in float64, the same for all instruction sets."""

    attended: Attended
    magnitude: Tensor
    """Mean magnitude of values, `[T, Hq, D]`."""


@lru_cache(maxsize=32)
def exact(dtype: torch.dtype, sinks: str, window: int, soft_cap: float) -> Exact:
    scenario = lay_out(MIXED, Heads(8, 4, 64), dtype=dtype)
    values, options = of_heads(sinks, 8), {"window": window, "soft_cap": soft_cap}
    wide = scenario.on(REFERENCE, wide=True)
    attended = attend(wide, values, REFERENCE, **options)
    magnitudes = contents(wide.kv)
    magnitudes[:, 1].abs_()
    fill(wide.kv, magnitudes)
    return Exact(attended, attend(wide, values, REFERENCE, **options).rows)


def check(got: Attended, wanted: Exact, dtype: torch.dtype) -> None:
    expected = wanted.attended
    if dtype is torch.float32:
        torch.testing.assert_close(got.rows.double(), expected.rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*(each.log_sum_exp for each in (got, expected)))
        return
    # The result and each weight are rounded, as in test_attention.
    limit = 1.01 * 2**-8 * (wanted.magnitude + 2 * expected.rows.abs()) + 1e-5
    error = (got.rows.double() - expected.rows).abs()
    assert bool((error <= limit).all()), f"{(error - limit).max()} beyond the limit"
    sums = [each.log_sum_exp for each in (got, expected)]
    torch.testing.assert_close(*sums, rtol=2**-8, atol=2**-8)


PATHS = [
    pytest.param(
        dtype,
        *options,
        sinks,
        marks=() if sinks == "random" or (i + j + k) % 2 == 0 else pytest.mark.slow,
    )
    for i, dtype in enumerate(DTYPES)
    for j, options in enumerate(OPTIONS)
    for k, sinks in enumerate(SINKS)
]
"""Every pair of dtype and options with random sinks, and some with very large or very small ones.

The rest are slow."""


@pytest.mark.parametrize(("dtype", "window", "soft_cap", "sinks"), PATHS)
def test_sinks_take_their_share_on_every_path(
    isa: str, threads: None, dtype: torch.dtype, window: int, soft_cap: float, sinks: str
) -> None:
    scenario = lay_out(MIXED, Heads(8, 4, 64), dtype=dtype)
    values, options = of_heads(sinks, 8), {"window": window, "soft_cap": soft_cap}
    for count in (1, 3):  # whole, and split by split
        _native.set_num_threads(count)
        got = attend(scenario.on(NATIVE), values, **options)
        check(got, exact(dtype, sinks, window, soft_cap), dtype)


@backends
@every_sink
@windows
def test_a_row_is_what_it_is_without_a_sink_times_its_keys_share(
    backend: Backend, window: int, soft_cap: float, sinks: str
) -> None:
    step = lay_out(MIXED, Heads(8, 2, 40)).on(backend)
    options = {"window": window, "soft_cap": soft_cap}
    plain = attend(step, None, backend, **options)
    values = of_heads(sinks, 8)
    got = attend(step, values, backend, **options)
    share = torch.sigmoid(plain.log_sum_exp - values)[..., None]
    torch.testing.assert_close(got.rows, plain.rows * share, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.log_sum_exp, torch.logaddexp(plain.log_sum_exp, values))


def test_the_log_sum_exp_is_that_of_the_scores(isa: str) -> None:
    scenario = lay_out([(1, 6, 300)], Heads(4, 2, 32))
    at = torch.arange(300)
    pages = torch.from_numpy(scenario.host.page_table)[0, 0, at // 16].long()
    keys = scenario.storage[0, 0][pages, :, at % 16].repeat_interleave(2, 1)
    scores = torch.einsum("thd,khd->thk", scenario.q.double(), keys.double()) * 32**-0.5
    hidden = at > torch.arange(294, 300)[:, None]
    expected = scores.masked_fill(hidden[:, None], NOTHING).logsumexp(-1)
    got = attend(scenario.on(NATIVE), None)
    torch.testing.assert_close(got.log_sum_exp, expected.float())


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_of_nothing_and_the_log_sum_exp_change_no_bit(
    isa: str, threads: None, backend: Backend, dtype: torch.dtype
) -> None:
    step = lay_out(MIXED, Heads(8, 2, 64), dtype=dtype).on(backend)
    for count in (1, 3):
        _native.set_num_threads(count)
        plain = backend.paged_attention(step.qkv, step.at, AttentionKind(0.125))
        with_sums = attend(step, None, backend)
        assert torch.equal(with_sums.rows.flatten(1), plain)
        if backend is NATIVE:
            got = attend(step, torch.full((8,), NOTHING))
            assert torch.equal(got.rows.flatten(1), plain)
            assert torch.equal(got.log_sum_exp, with_sums.log_sum_exp)


@pytest.mark.parametrize(
    ("heads", "window", "soft_cap"),
    [(Heads(2, 2, 24), 0, 0.0), (Heads(3, 1, 24), 300, 4.0), (Heads(2, 1, 32), 0, 0.0)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_to_the_last_bit_in_any_chunk_batch_and_page_size(
    isa: str, dtype: torch.dtype, heads: Heads, window: int, soft_cap: float
) -> None:
    context, sinks = 1100, of_heads("random", heads.q)
    options = {"window": window, "soft_cap": soft_cap}
    whole = attend(
        lay_out([(7, context, context)], heads, dtype=dtype).on(NATIVE), sinks, **options
    )
    for page_size, chunk in ((16, 1), (1, 37), (64, 300), (7, 3)):
        for end in (1, 129, 512, 513, 1100):
            tokens = min(chunk, end)
            others = [(1, 5, 40), (7, tokens, end), (2, 1, 900)]
            scenario = lay_out(others, heads, page_size=page_size, dtype=dtype, seed=end)
            got = attend(scenario.on(NATIVE), sinks, **options)
            for rows, expected in zip(got, whole, strict=True):
                assert torch.equal(rows[5 : 5 + tokens], expected[end - tokens : end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_threads_nor_shared_pages_change_a_bit(threads: None, dtype: torch.dtype) -> None:
    scenario = lay_out([(1, 1, 3000), (1, 1, 2100), (2, 3, 1500)], Heads(8, 2, 64), dtype=dtype)
    scenario.share(1, 0, 0, 128)
    sinks = of_heads("random", 8)
    _native.set_num_threads(1)
    alone = attend(scenario.on(NATIVE), sinks)
    for row, at in ((0, slice(0, 1)), (1, slice(1, 2)), (2, slice(2, 5))):
        own = attend(scenario.alone(row).on(NATIVE), sinks)
        assert torch.equal(own.rows, alone.rows[at])
        assert torch.equal(own.log_sum_exp, alone.log_sum_exp[at])
    for count in (2, 3, 8):
        _native.set_num_threads(count)
        got = attend(scenario.on(NATIVE), sinks)
        assert torch.equal(got.rows, alone.rows), count
        assert torch.equal(got.log_sum_exp, alone.log_sum_exp), count


@backends
@windows
def test_the_logit_rows_alone_are_those_of_all_rows(
    backend: Backend, window: int, soft_cap: float
) -> None:
    rows = [110, 3, 2, 2, 71, 0, 0, 105, 104]
    scenario = lay_out(MIXED, Heads(8, 2, 40))
    sinks, options = of_heads("random", 8), {"window": window, "soft_cap": soft_cap}
    whole = attend(scenario.on(backend), sinks, backend, **options)
    some = dataclasses.replace(
        scenario, host=dataclasses.replace(scenario.host, logit_rows=np.array(rows, np.int64))
    )
    got = attend(some.on(backend), sinks, backend, **options, logit_rows_only=True)
    assert torch.equal(got.rows, whole.rows[rows])
    assert torch.equal(got.log_sum_exp, whole.log_sum_exp[rows])


# -- parts of a context, merged


@dataclasses.dataclass(frozen=True)
class Cut:
    """Decodes over pages of 4, and the places where each context is cut, in pages, in order."""

    scenario: Scenario
    contexts: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def part(self, index: int, sinks: Tensor | None, backend: Backend) -> Attended:
        """Compute attention over the keys between two cuts. Rows without keys are NaN."""
        host, heads, dim = self.scenario.host, *self.scenario.q.shape[1:]
        page_size = self.scenario.page_size
        out = Attended(
            torch.full((len(self.contexts), heads, dim), float("nan")),
            torch.full((len(self.contexts), heads), NOTHING),
        )
        table = np.zeros_like(host.page_table)
        rows, contexts = [], []
        for row, (context, cuts) in enumerate(zip(self.contexts, self.cuts, strict=True)):
            first, end = cuts[index], cuts[index + 1]
            keys = min(end * page_size, context) - first * page_size
            if keys > 0:
                own = host.page_table[0, row, first:]
                table[0, len(rows), : len(own)] = own
                rows.append(row)
                contexts.append(keys)
        if rows:
            ones = np.ones(len(rows), np.int64)
            laid_out = HostBatch.laid_out(
                ones, np.array(contexts), table[:, : len(rows)], page_size
            )
            part = dataclasses.replace(self.scenario, host=laid_out, q=self.scenario.q[rows])
            got = attend(part.on(backend), sinks, backend)
            out.rows[rows], out.log_sum_exp[rows] = got
        return out


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    contexts = tuple(draw(st.lists(st.integers(1, 60), min_size=1, max_size=4)))
    parts = draw(st.integers(1, 4))
    where = []
    for context in contexts:
        pages = -(-context // 4)
        inner = sorted(
            draw(st.lists(st.integers(0, pages), min_size=parts - 1, max_size=parts - 1))
        )
        where.append((0, *inner, pages))
    scenario = lay_out(
        [(i, 1, context) for i, context in enumerate(contexts)], Heads(4, 2, 20), page_size=4
    )
    return Cut(scenario, contexts, tuple(where))


@backends
@settings(max_examples=examples(40))
@given(cut=cuts(), data=st.data())
def test_parts_merged_by_their_log_sum_exp_are_the_whole(
    backend: Backend, cut: Cut, data: st.DataObject
) -> None:
    parts = len(cut.cuts[0]) - 1
    sinks = of_heads("random", 4) if data.draw(st.booleans(), "sinks") else None
    # A sink may count in only one part: here, it is merged as a part of its own.
    whole = attend(cut.scenario.on(backend), sinks, backend)
    order = data.draw(st.permutations(range(parts)), "order")
    total = cut.part(order[0], None, backend)
    for index in order[1:]:
        backend.merge_attention(*flat(total), *flat(cut.part(index, None, backend)))
    if sinks is not None:
        # This part has a sink and no value.
        alone = Attended(torch.zeros_like(total.rows), sinks.expand_as(total.log_sum_exp).clone())
        backend.merge_attention(*flat(total), *flat(alone))
    torch.testing.assert_close(total.rows, whole.rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.log_sum_exp, whole.log_sum_exp, rtol=1e-5, atol=1e-5)


@backends
def test_one_part_may_have_the_sinks(backend: Backend) -> None:
    scenario = lay_out([(1, 1, 50), (2, 1, 37)], Heads(4, 2, 20), page_size=4)
    cut = Cut(scenario, (50, 37), ((0, 5, 13), (0, 1, 10)))
    sinks = of_heads("random", 4)
    whole = attend(scenario.on(backend), sinks, backend)
    for owner in (0, 1):
        total, part = (cut.part(i, sinks if i == owner else None, backend) for i in (0, 1))
        backend.merge_attention(*flat(total), *flat(part))
        torch.testing.assert_close(total.rows, whole.rows)
        torch.testing.assert_close(total.log_sum_exp, whole.log_sum_exp)


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_without_keys_is_never_read(isa: str, backend: Backend, dtype: torch.dtype) -> None:
    rows, sums = random(6, 40, dtype=dtype), random(6, 2, seed=1)
    garbage = torch.full((6, 40), float("nan"), dtype=dtype)
    nothing = torch.full((6, 2), NOTHING)
    for into, part in (
        ((rows, sums), (garbage, nothing)),
        ((garbage, nothing), (rows, sums)),
    ):
        merged, merged_sums = (each.clone() for each in into)
        backend.merge_attention(merged, merged_sums, *part)
        assert torch.equal(merged, rows)
        assert torch.equal(merged_sums, sums)
    merged, merged_sums = garbage.clone(), nothing.clone()
    backend.merge_attention(merged, merged_sums, garbage, nothing)
    assert not merged.any()
    assert torch.equal(merged_sums, nothing)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_native_merge_is_the_references(isa: str, dtype: torch.dtype) -> None:
    pairs = [(random(9, 3 * 37, dtype=dtype, seed=i), 9 * random(9, 3, seed=i + 7)) for i in (0, 1)]
    got, expected = ([each.clone() for pair in pairs for each in pair] for _ in range(2))
    NATIVE.merge_attention(*got)
    REFERENCE.merge_attention(*expected)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])


def flat(attended: Attended) -> tuple[Tensor, Tensor]:
    return attended.rows.view(len(attended.rows), -1), attended.log_sum_exp


@backends
def test_what_does_not_fit_is_refused_by_name(backend: Backend) -> None:
    step = lay_out([(1, 2, 40)], Heads(4, 2, 32)).on(backend)
    for wrong in (torch.zeros(3), torch.zeros(4, 1), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match=r"sinks must be contiguous, of shape \(4,\)"):
            attend(step, wrong, backend)
    with pytest.raises(TypeError, match=r"sinks must be torch.float32, got torch.bfloat16"):
        attend(step, torch.zeros(4, dtype=torch.bfloat16), backend)
    with pytest.raises(ValueError, match=r"log_sum_exp must be contiguous, of shape \(2, 4\)"):
        backend.paged_attention(step.qkv, step.at, AttentionKind(1), log_sum_exp=torch.zeros(4, 2))
    out, sums = torch.zeros(2, 128), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"part must be contiguous, of shape \(2, 128\)"):
        backend.merge_attention(out, sums, torch.zeros(2, 64), sums)
    with pytest.raises(
        ValueError, match=r"log_sum_exp must have shape \(2, Hq\) with Hq a divisor"
    ):
        backend.merge_attention(out, torch.zeros(2, 3), out.clone(), sums)
    with pytest.raises(ValueError, match=r"part_log_sum_exp must be contiguous"):
        backend.merge_attention(out, sums, out.clone(), torch.zeros(2, 2))
    with pytest.raises(TypeError, match=r"part must be torch.float32, got torch.float64"):
        backend.merge_attention(out, sums, out.double(), sums)


def test_kinds_with_sinks_of_their_own_differ() -> None:
    sinks = torch.zeros(2)
    assert AttentionKind(1.0, 4) == AttentionKind(1.0, 4)
    assert AttentionKind(1.0, 4, 0.0, sinks) == AttentionKind(1.0, 4, 0.0, sinks)
    assert AttentionKind(1.0, 4, 0.0, sinks) != AttentionKind(1.0, 4, 0.0, sinks.clone())
    assert AttentionKind(1.0, 4, 0.0, sinks) != AttentionKind(1.0, 4)
    assert len({AttentionKind(1.0), AttentionKind(1.0), AttentionKind(1.0, 3)}) == 2
