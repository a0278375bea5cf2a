"""Log-probabilities of sampled tokens and of known ones, from the model's own logits."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.request import SamplingParams
from aioserve.sampling.edits import RowEdits, SlotEdits
from aioserve.sampling.extras import RowExtras
from aioserve.sampling.logprobs import LogprobRows, MostLikely, highest

VOCAB = 50


@given(
    samples=st.lists(st.none() | st.integers(0, 20), max_size=40),
    targets=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, 20)), max_size=40),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_row_has_what_it_asks_for(samples, targets, seed):
    generator = torch.Generator().manual_seed(seed)
    count = len(samples)
    logits = torch.randn(count + len(targets), VOCAB, generator=generator) * 4
    drawn = torch.randint(0, VOCAB, (count,), generator=generator)
    wanted = LogprobRows(
        [row for row, top in enumerate(samples) if top is not None],
        [*[top for top in samples if top is not None], *[top for _, top in targets]],
        first_scored=count,
        target_ids=np.array([token for token, _ in targets], np.int64),
    )

    most_likely = MostLikely(wanted, logits)
    most_likely.note(drawn)
    of_rows, scored = wanted.read(most_likely.values.numpy(), most_likely.ids.numpy())

    expected = torch.log_softmax(logits.double(), dim=1)
    tokens = [*drawn.tolist(), *[token for token, _ in targets]]
    tops = [*samples, *[top for _, top in targets]]
    found = {**of_rows, **{count + i: one for i, one in enumerate(scored)}}
    assert list(found) == [row for row, top in enumerate(tops) if top is not None]
    for row, one in found.items():
        assert abs(one.logprob - expected[row, tokens[row]]) < 1e-5
        values, ids = expected[row].topk(tops[row])
        assert [top.id for top in one.top] == ids.tolist()
        assert np.allclose([top.logprob for top in one.top], values, atol=1e-5)


def test_they_are_those_of_the_model_whatever_the_row_is_edited_to():
    logits = torch.zeros(2, 4)
    logits[0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    before = logits.clone()
    edits = SlotEdits(
        SamplingParams(allowed_token_ids=[0]),
        prompt_tokens=1,
        known_ids=None,
        end_ids=(),
        bad_word_ids=(),
    )
    wanted = LogprobRows([0], [2], first_scored=2, target_ids=np.empty(0, np.int64))
    asked = RowExtras(RowEdits([(0, edits, 1)]), wanted).before_draw(logits, 2)
    token_ids = asked.sampled.argmax(dim=1)
    asked.after_draw(token_ids)

    assert token_ids.tolist() == [0, 0]
    assert torch.equal(logits, before)
    assert asked.most_likely is not None
    expected = torch.log_softmax(before[0], dim=0)
    torch.testing.assert_close(asked.most_likely.values[0], expected[[0, 3, 2]])


@given(
    beams=st.lists(st.booleans(), min_size=1, max_size=40),
    penalty=st.sampled_from([0.5, 1.3, 2.0]),
    presence=st.sampled_from([-1.0, 0.0, 0.7]),
    others=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_of_beams_they_are_what_edits_leave_of_them_and_no_row_changes_another(
    beams, penalty, presence, others, seed
):
    generator = torch.Generator().manual_seed(seed)
    count = len(beams)
    logits = torch.randn(count + 2, VOCAB, generator=generator) * 4
    before = logits.clone()
    known = torch.randint(0, VOCAB, (count, 8), generator=generator).numpy().astype(np.int32)
    params = SamplingParams(repetition_penalty=penalty, presence_penalty=presence)
    rows = [
        (
            row,
            SlotEdits(
                params,
                prompt_tokens=5,
                of_logprobs=is_beam,
                known_ids=known[row],
                end_ids=(),
                bad_word_ids=(),
            ),
            8,
        )
        for row, is_beam in enumerate(beams)
        if is_beam or others
    ]
    edits = RowEdits(rows)
    wanted = LogprobRows(
        range(count),
        [7] * (count + 2),
        first_scored=count,
        target_ids=np.array([3, 4], np.int64),
        edited=edits.of_logprobs,
    )
    asked = RowExtras(edits, wanted).before_draw(logits, count)
    drawn = asked.sampled.argmax(dim=1)
    asked.after_draw(drawn)
    assert asked.most_likely is not None
    told, _ = wanted.read(asked.most_likely.values.numpy(), asked.most_likely.ids.numpy())

    of_model = torch.log_softmax(before, dim=1)
    for row, is_beam in enumerate(beams):
        expected = of_model[row].clone()
        if is_beam:
            ids = sorted(set(known[row].tolist()))
            below = expected[ids] < 0
            expected[ids] = torch.where(below, expected[ids] * penalty, expected[ids] / penalty)
            expected[sorted(set(known[row, 5:].tolist()))] -= presence
            torch.testing.assert_close(asked.sampled[row], expected)
        assert abs(told[row].logprob - expected[drawn[row]].item()) < 1e-4
        values = [top.logprob for top in told[row].top]
        assert np.allclose(values, expected.topk(7).values, atol=1e-4)
    kept = [row for row, is_beam in enumerate([*beams, False, False]) if not is_beam]
    assert torch.equal(logits[kept], before[kept])


@given(
    values=st.lists(
        st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("-inf")]), min_size=30, max_size=30),
        min_size=1,
        max_size=6,
    ),
    count=st.integers(0, 30),
    may_wait=st.booleans(),
)
def test_of_equal_ones_the_lowest_id_comes_first_however_many_are_asked_for(
    values, count, may_wait
):
    rows = torch.tensor(values)
    found, ids = highest(rows, count, may_wait=may_wait)

    order = rows.argsort(dim=1, descending=True, stable=True)[:, :count]
    assert torch.equal(ids, order)
    assert torch.equal(found, rows.gather(1, order))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_what_others_ask_for_changes_no_id_of_equal_ones(tops, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 3, (len(tops), VOCAB), generator=generator).float()

    def told(rows: list[int]) -> list[list[int]]:
        wanted = LogprobRows(
            range(len(rows)),
            [tops[row] for row in rows],
            first_scored=len(rows),
            target_ids=np.empty(0, np.int64),
        )
        most_likely = MostLikely(wanted, logits[rows])
        most_likely.note(torch.zeros(len(rows), dtype=torch.int64))
        read, _ = wanted.read(most_likely.values.numpy(), most_likely.ids.numpy())
        return [[top.id for top in one.top] for one in read.values()]

    together = told([*range(len(tops))])
    assert together == [told([row])[0] for row in range(len(tops))]
