"""The table of sampling parameters says the same as what it can't be made into."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from aioserve import SamplingParams
from aioserve.ops import SampleRows
from aioserve.sampling_params import (
    BEAM_DEFAULTS,
    COLUMNS,
    DRAWN_FREELY,
    PARAMETERS,
    REHEARSED,
    BeamParams,
)
from aioserve.server.ollama.ollama_request import ModelOptions
from aioserve.server.openai.fields import AnswerFields


def test_each_parameter_is_a_row_in_its_order() -> None:
    assert list(PARAMETERS) == list(SamplingParams.__struct_fields__)


def test_beam_searches_take_what_the_table_says() -> None:
    taken = {name for name, row in PARAMETERS.items() if row.beams == "taken"}
    assert BeamParams.__optional_keys__ == taken == BEAM_DEFAULTS.keys()


def test_rows_are_alike_and_as_their_parameters_say() -> None:
    keys = np.arange(3, dtype=np.uint64)
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, typical_p=0.75)
    values = {name: getattr(params, name) for name in COLUMNS}
    rows = SampleRows.alike(values, np.arange(3), seeds=keys, positions=keys)
    for name, column in COLUMNS.items():
        assert rows[name].tolist() == [getattr(params, name)] * 3
        assert rows[name].dtype == column.dtype
    assert len(SampleRows.none()) == 0


def test_who_draws_freely_draws_from_all_tokens() -> None:
    assert SamplingParams(**DRAWN_FREELY) == SamplingParams()
    assert DRAWN_FREELY.keys() == REHEARSED.keys() == COLUMNS.keys()
    rehearsed = SamplingParams(**REHEARSED)
    assert rehearsed.min_p > 0
    assert max(rehearsed.top_p, rehearsed.typical_p) < 1


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_a_body_has_a_parameter_that_is_handed_on_under_its_name(name: str) -> None:
    row = PARAMETERS[name]
    optional: Any = (None if row.body is None else row.body | None, None)
    own: dict[str, Any] = {field.name: field for field in msgspec.structs.fields(AnswerFields)}
    if row.body is not None:
        assert (own[name].type, own[name].default) == optional
    if row.ollama is not None:
        ollama = {field.name: field for field in msgspec.structs.fields(ModelOptions)}
        assert (ollama[row.ollama].type, ollama[row.ollama].default) == optional


@pytest.mark.parametrize(
    ("name", "value", "of_history"),
    [
        ("repetition_penalty", 1.5, True),
        ("presence_penalty", -1.0, True),
        ("frequency_penalty", 0.5, True),
        ("bad_words", ["a"], True),
        ("logits_processors", ["a"], True),
        ("logit_bias", {1: 1.0}, False),
        ("allowed_token_ids", [0], False),
        ("min_tokens", 1, False),
    ],
)
def test_what_edits_logits_is_known_by_its_value(name: str, value: Any, of_history: bool) -> None:
    params = SamplingParams(**{name: value})
    assert params.edits_logits
    assert params.needs_history == of_history
    assert not SamplingParams(temperature=0, top_k=1, seed=1, stop="a", n=2).edits_logits
