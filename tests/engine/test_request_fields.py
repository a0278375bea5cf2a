"""Metadata, session and forecast, as policies, admission checks and observers see them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve import (
    Engine,
    InvalidRequestError,
    Observer,
    RequestInfo,
    RequestRejectedError,
    RequestView,
    SamplingParams,
    SchedulerView,
    SchedulingPolicy,
    Verdict,
    hookimpl,
)
from aioserve.testing import FakeModel

PROMPT = [1, 2, 3]
SHORT = SamplingParams(max_tokens=3, temperature=0.0, seed=0)
SAID = {"metadata": {"step": "plan", "": "é"}, "session_id": "s", "predicted_output_tokens": 7}


def told_of(request: RequestView | RequestInfo) -> tuple[Mapping[str, str], str | None, int | None]:
    return request.metadata, request.session_id, request.predicted_output_tokens


class Seeing(SchedulingPolicy):
    """Keeps each request that arrives."""

    def __init__(self) -> None:
        self.seen: list[RequestView] = []

    def arrived(self, requests: Sequence[RequestView]) -> None:
        self.seen.extend(requests)


class Ears(Observer):
    def __init__(self) -> None:
        self.heard: list[RequestInfo] = []

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        self.heard.extend(requests)


class Door:
    """An admission check that admits every request."""

    def __init__(self) -> None:
        self.asked: list[RequestInfo] = []

    @hookimpl
    def aioserve_admit(self, request: RequestInfo) -> None:
        self.asked.append(request)


@pytest.mark.asyncio
async def test_policies_observers_and_admission_checks_see_what_the_caller_said() -> None:
    policy, ears, door = Seeing(), Ears(), Door()
    async with Engine(FakeModel(), policy=policy, plugins=[door]) as engine:
        engine.observe(ears)
        await engine.generate(PROMPT, SHORT, **SAID)
        await engine.generate(PROMPT, SHORT)
    said, nothing = tuple(SAID.values()), ({}, None, None)
    for seen in (policy.seen, ears.heard, door.asked):
        assert [told_of(one) for one in seen] == [said, nothing]


@pytest.mark.asyncio
async def test_a_request_that_waits_is_admitted_by_what_its_policy_sees_of_it() -> None:
    class OnlyPlans(SchedulingPolicy):
        def admit(self, request: RequestView, view: SchedulerView) -> Verdict:
            wanted = request.metadata.get("step") == "plan" and request.session_id == "s"
            return Verdict.NOW if wanted else Verdict.NEVER

    async with Engine(FakeModel(), policy=OnlyPlans()) as engine:
        assert await engine.generate(PROMPT, SHORT, **SAID)
        with pytest.raises(RequestRejectedError):
            await engine.generate(PROMPT, SHORT, metadata={"step": "act"}, session_id="s")


@pytest.mark.asyncio
async def test_metadata_is_a_copy_that_nobody_can_change() -> None:
    policy, mine = Seeing(), {"step": "plan"}
    async with Engine(FakeModel(), policy=policy) as engine:
        stream = engine.stream(PROMPT, SHORT, metadata=mine)
        mine["step"] = "act"
        assert [token.id async for token in stream]
        (seen,) = policy.seen
        assert seen.metadata == {"step": "plan"}
        with pytest.raises(TypeError):
            seen.metadata["step"] = "act"  # pyright: ignore[reportIndexIssue]
        with pytest.raises(AttributeError):
            seen.session_id = "mine"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.asyncio
async def test_a_forecast_changes_no_answer_and_may_be_wrong_either_way() -> None:
    async with Engine(FakeModel()) as engine:
        plain = await engine.generate(PROMPT, SHORT)
        for forecast in (1, 2, 3, 4, 2**63 - 1):
            answer = await engine.generate(PROMPT, SHORT, predicted_output_tokens=forecast)
            assert answer.token_ids == plain.token_ids


@pytest.mark.asyncio
async def test_scores_embeddings_and_beams_have_metadata_and_session() -> None:
    policy = Seeing()
    said: Any = {"metadata": {"step": "plan"}, "session_id": "s"}
    async with Engine(FakeModel(), policy=policy) as engine:
        await engine.score(PROMPT, [1], **said)
        await engine.embed([PROMPT, PROMPT], **said)
        looks = len(policy.seen)
        await engine.beam_search(PROMPT, beam_width=2, max_tokens=2, **said)
        assert len(policy.seen) > looks == 3
        assert all(told_of(one) == ({"step": "plan"}, "s", None) for one in policy.seen)
        # A request without an answer has nothing to forecast.
        with pytest.raises(TypeError, match="predicted_output_tokens"):
            await engine.score(PROMPT, [1], predicted_output_tokens=1)  # pyright: ignore


TEXTS = st.text(st.characters(exclude_categories=()), max_size=2)
KEYS = st.one_of(TEXTS, st.integers(62, 66).map(lambda n: "k" * n), st.sampled_from([None, 1]))
VALUES = st.one_of(TEXTS, st.integers(510, 514).map(lambda n: "v" * n), st.sampled_from([None, 1]))
GIVEN = st.one_of(
    st.dictionaries(TEXTS, TEXTS, max_size=2),
    st.dictionaries(KEYS, VALUES, max_size=3),
    st.integers(14, 18).map(lambda n: {str(i): "" for i in range(n)}),
)


def fits(text: Any, most: int) -> bool:
    if not isinstance(text, str) or len(text) > most:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)


def test_metadata_is_taken_exactly_within_its_bounds() -> None:
    async def tried(given: Any) -> None:
        door = Door()
        good = len(given) <= 16 and all(fits(k, 64) and fits(v, 512) for k, v in given.items())
        async with Engine(FakeModel(), plugins=[door]) as engine:
            for form in (given, MappingProxyType(given)):
                if good:
                    await engine.generate(PROMPT, SHORT, metadata=form)
                    assert door.asked.pop().metadata == given
                    continue
                with pytest.raises(InvalidRequestError, match=r"^metadata") as caught:
                    engine.stream(PROMPT, SHORT, metadata=form)
                assert caught.value.argument == "metadata"
                assert not door.asked

    @given(GIVEN)
    def check(given: Any) -> None:
        asyncio.run(tried(given))

    check()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("stream", ([1],)),
        ("generate", ([1],)),
        ("beam_search", ([1],)),
        ("chat", ([],)),
        ("score", ([1], [2])),
        ("score_each", ([1], [[2]])),
        ("select", ([1], [[2]])),
        ("embed", ([1],)),
        ("embed_counted", ([1],)),
        ("encode", ([1],)),
    ],
)
async def test_an_unknown_option_of_a_call_is_named_as_python_does(
    call: str, arguments: tuple[Any, ...]
) -> None:
    async def called(engine: Engine) -> None:
        await getattr(engine, call)(*arguments, temperatur=1)

    async with Engine(FakeModel()) as engine:
        with pytest.raises(TypeError, match=rf"^{call}\(\) got an unexpected .* 'temperatur'$"):
            await called(engine)
