"""Cache salt and tenant of a call: those of its key come before those of its body."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import Engine, InvalidRequestError
from aioserve.server.app_state import AppState, Call
from aioserve.server.call_log import CallLog
from aioserve.server.openai.fields import AnswerFields, combined_salt
from aioserve.server.settings import ServerSettings
from tests.server.serving import served
from tests.server.talking import post

SALTS = st.one_of(st.none(), st.text(max_size=4))


@given(st.tuples(SALTS, SALTS), st.tuples(SALTS, SALTS))
def test_salts_are_equal_where_both_parts_are(one: Any, other: Any) -> None:
    assert (combined_salt(*one) == combined_salt(*other)) == (one == other)


def test_the_salt_of_a_body_never_is_that_of_a_key() -> None:
    theirs = combined_salt("key", "x")
    assert combined_salt("key", None) == "key"
    assert combined_salt(None, "key") != "key"
    assert combined_salt(None, theirs) != theirs
    assert len(combined_salt("k" * 256, "x" * 10_000) or "") == 64


def test_the_tenant_is_the_keys_before_the_bodys() -> None:
    about = AppState(Engine(), ServerSettings())
    body = AnswerFields(model="m", user="me", cache_salt="x")
    assert body.options(Call(about, CallLog()))["tenant"] == "me"
    keyed = body.options(Call(about, CallLog(tenant="key", cache_salt="salt")))
    assert keyed["tenant"] == "key"
    assert keyed["cache_salt"] == combined_salt("salt", "x")
    assert AnswerFields(model="m", user="").options(Call(about, CallLog()))["tenant"] is None


@pytest.mark.parametrize(
    ("salt", "is_taken"), [("", False), ("x", True), ("x" * 256, True), ("x" * 257, False)]
)
def test_a_bodys_salt_has_the_engines_bounds(salt: str, is_taken: bool) -> None:
    call = Call(AppState(Engine(), ServerSettings()), CallLog())
    body = AnswerFields(model="m", cache_salt=salt)
    if is_taken:
        assert body.options(call)["cache_salt"] == combined_salt(None, salt)
    else:
        with pytest.raises(InvalidRequestError, match="cache_salt must be a str of 1 to 256"):
            body.options(call)


@pytest.mark.asyncio
async def test_prefixes_are_shared_within_a_salt_alone() -> None:
    async with served(num_pages=256) as (_, client):
        cached = []
        for salt in ("a", "a", "b", None):
            body = {"model": "pyhelp", "prompt": "word " * 100, "max_tokens": 1}
            answer = await post(client, "/v1/completions", body | {"cache_salt": salt})
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == cached[3] == 0
    assert cached[1] > 50
