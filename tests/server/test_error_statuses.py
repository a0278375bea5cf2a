"""Errors that a client has caused: each is a 4xx, and names what to change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Engine, errors
from aioserve.server import create_app
from aioserve.server.errors import STATUSES, api_error_of
from tests.server.serving import client_of
from tests.tiers import examples

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.AioserveError)
]
CLIENTS_OWN = (
    errors.InvalidRequestError,
    errors.RequestRejectedError,
    errors.StreamStalledError,
)
NEVER_TOLD = (
    errors.AioserveError,
    errors.RequestFailedError,
    errors.EngineError,
    errors.RequestRefusedError,
)


def statuses(kind: type[errors.AioserveError]) -> tuple[int, str | None]:
    error = api_error_of(kind("planted"))
    return error.status, error.code


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_status_of_an_error_says_whose_it_is(kind: type[errors.AioserveError]) -> None:
    status, code = statuses(kind)
    if issubclass(kind, CLIENTS_OWN):
        assert 400 <= status < 500
    elif kind not in NEVER_TOLD:
        assert status in (429, 500, 503, 504)
    assert code is not None or status == 400


def test_classes_of_errors_stand_before_their_bases() -> None:
    kinds = [kind for kind, _, _ in STATUSES]
    for place, kind in enumerate(kinds):
        assert not any(issubclass(later, kind) for later in kinds[place + 1 :])


LETTER = {"allowed_token_ids": [40]}
FORBIDDING: dict[str, list[Any]] = {
    "structured_outputs": [
        {"regex": "a+"},
        {"choice": ["ab", "ac"]},
        {"json": {"type": "integer"}},
        {"grammar": 'root ::= "a" root | "b"'},
    ],
    "bad_words": [["a"], ["a", "b", "c"], [str(digit) for digit in range(10)]],
    "allowed_token_ids": [[40], [0], list(range(50, 60))],
    "min_tokens": [0, 6],
    "stop_token_ids": [[0], [40]],
    "logit_bias": [{"40": -100}],
    "ignore_eos": [False, True],
}
bodies = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in FORBIDDING.items()}
)


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(bodies, min_size=1, max_size=8))
@pytest.mark.asyncio
async def test_no_parameters_together_make_a_fault_of_the_server(
    asked: list[dict[str, Any]],
) -> None:
    async with Engine("pyhelp") as engine, client_of(create_app(engine)) as client:
        for fields in asked:
            body = {"model": "pyhelp", "prompt": "x", "max_tokens": 8, **fields}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                error = answer.json()["error"]
                named = "structured_outputs" if "structured_output" in error["param"] else None
                assert (named or error["param"]) in fields
                assert error["message"].startswith(error["param"])


@pytest.mark.asyncio
async def test_parameters_that_forbid_every_token_are_named_in_each_api() -> None:
    forms = {"structured_outputs": {"regex": "a+"}, "bad_words": ["a"]}
    ask = [{"role": "user", "content": "x"}]
    async with Engine("pyhelp") as engine, client_of(create_app(engine)) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "x", "max_tokens": 9}),
            ("/v1/chat/completions", {"messages": ask, "max_tokens": 9}),
            ("/v1/chat/completions", {"messages": ask, "max_tokens": 9, "n": 2}),
        ):
            answer = await client.post(path, json={"model": "pyhelp", **body, **forms})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == "structured_outputs"
            assert error["message"].startswith("structured_outputs and bad_words must leave")
