"""Heads draft the same tokens by a step program as op by op, and leave the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.models.decoder import Decoder
from aioserve.models.heads.decoder_head import DecoderHead
from aioserve.models.heads.loader import load_head
from aioserve.models.loader import load_model
from aioserve.ops import SampleRows, backend_named
from aioserve.sampling_params import DRAWN_FREELY
from tests.models.heads.directories import eagle3_config, eagle3_tensors, write_head
from tests.models.heads.runs import HeadRun
from tests.models.heads.test_eagle3 import CONFIGS
from tests.models.heads.test_mtp import mtp_config, mtp_tensors
from tests.parity.tiny_models import VOCAB_SIZE, write
from tests.tiers import examples

DTYPES = ("float32", "bfloat16")
KINDS = (*CONFIGS, "mtp")
Heads = dict[tuple[str, str], tuple[DecoderHead, DecoderHead]]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """Load a head of each dtype and kind, op by op and by a program."""
    path = tmp_path_factory.mktemp("heads")
    write("llama", path / "target")
    for name, (changed, has) in CONFIGS.items():
        config = eagle3_config(**changed)
        write_head(path / name, config, eagle3_tensors(config, **has))
    write_head(path / "mtp", mtp_config(), mtp_tensors())
    made: Heads = {}
    for dtype in DTYPES:
        plain, program = (target_of(path, dtype, use_program=uses) for uses in (False, True))
        for name in KINDS:
            made[dtype, name] = loaded(path / name, plain), loaded(path / name, program)
    return made


def target_of(path: Path, dtype: str, *, use_program: bool) -> Decoder:
    native = backend_named("native")
    return load_model(path / "target", dtype=dtype, backend=native, use_program=use_program)


def loaded(path: Path, target: Decoder) -> DecoderHead:
    head = load_head(path, target)
    assert isinstance(head, DecoderHead)
    assert all((p is None) == (target.program is None) for p in head._programs.values())
    return head


def sample_rows(count: int, temperature: float, position: int) -> SampleRows:
    return SampleRows.alike(
        {**DRAWN_FREELY, "temperature": temperature},
        np.zeros(count, np.int64),
        seeds=np.arange(count, dtype=np.uint64),
        positions=np.full(count, position, np.uint64),
    )


@given(
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    page_size=st.sampled_from([2, 8]),
    temperature=st.sampled_from([0.0, 1.0]),
    num_drafts=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(60), deadline=None)
def test_drafts_of_a_program_are_those_of_its_ops(
    heads, dtype, kind, counts, page_size, temperature, num_drafts, seed
):
    generator = torch.Generator().manual_seed(seed)
    drawn_ids = torch.randint(VOCAB_SIZE, (sum(counts),), generator=generator).split(counts)
    columns = heads[dtype, kind][0]._features
    features = torch.randn(sum(counts), columns, generator=generator)
    made = []
    for head in heads[dtype, kind]:
        run = HeadRun(head, backend_named("native"), page_size)
        rows, given = [(0, ids.tolist()) for ids in drawn_ids], features.to(head.dtype)
        found: list[torch.Tensor] = []
        for draft in range(num_drafts + 1):
            fuses, last_tokens = draft == 0, torch.zeros(1, dtype=torch.int64)
            batch, samples = run.batch(rows), sample_rows(len(rows), temperature, draft)
            logits, _ = head.forward(given, batch, run.cache, fuses=fuses)
            drawn, given = head.draw(given, batch, run.cache, samples, last_tokens, fuses=fuses)
            found += [logits, given.float(), drawn.token_ids]
            rows = [
                (first + len(ids), [token])
                for (first, ids), token in zip(rows, drawn.token_ids.tolist(), strict=True)
            ]
        found.append(run.cache.storage.float().nan_to_num(7.0))
        made.append(found)
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("by_program", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_missed_is_computed_without_logits(heads, kind, by_program):
    head = heads["float32", kind][by_program]
    run = HeadRun(head, backend_named("native"), page_size=4)
    batch, rows = run.batch([(0, [1, 2, 3])], wanted=False), torch.randn(3, head._features)
    logits, hidden = head.forward(rows, batch, run.cache, fuses=True)
    assert (logits.shape, hidden.shape) == ((0, VOCAB_SIZE), (0, head.hidden_size))
    assert not run.cache.storage.isnan().all()
