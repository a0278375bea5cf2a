"""Streams and whole answers have the same content, for any request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.serving import served
from tests.server.talking import (
    ASK,
    CHAT_BODY,
    TOOLS,
    chat_joined,
    chat_whole,
    completions_joined,
    post,
    scripted,
)
from tests.tiers import examples

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo Å"}}\n</tool_call>'
ANSWERS = (
    "It rains, as ever.",
    f"Let me see. {CALL}",
    f"<think>I wonder\nwhat €</think>\n\n{CALL}\n{CALL} and so on",
    f"{CALL} <tool_call>{{'name'",
    "<think>never closed  ",
    "",
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(-3, 9),
        "n": st.integers(1, 4),
        "stop": st.lists(st.sampled_from(["a", "ev", "\n", "</", "Oslo", "€"]), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "max_tokens": st.integers(1, 60),
        "min_tokens": st.just(1),
        "return_token_ids": st.booleans(),
        "echo": st.booleans(),
        "truncate_prompt_tokens": st.sampled_from([-1, 1, 2, 30]),
        "truncation_side": st.sampled_from(["left", "right"]),
    },
).map(
    lambda body: (
        body
        if "truncate_prompt_tokens" in body
        else {name: value for name, value in body.items() if name != "truncation_side"}
    )
)
CHATS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.just(TOOLS),
        "parallel_tool_calls": st.booleans(),
        "logprobs": st.just(True),
    },
)


def quick(count: int) -> Any:
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples(count), deadline=None, suppress_health_check=slow)


@pytest.mark.asyncio
async def test_of_chat() -> None:
    async with scripted(*ANSWERS) as (engine, client):
        bodies: list[dict[str, Any]] = _examples(BODIES, CHATS, 60)
        for body in bodies:
            body = CHAT_BODY | body
            body.pop("logprobs", None)  # a fake model has none
            answer = await post(client, "/v1/chat/completions", body)
            events = await post(client, "/v1/chat/completions", body | {"stream": True})
            assert chat_joined(events) == chat_whole(answer), body
            if body.get("return_token_ids"):
                ids = [
                    [
                        token_id
                        for event in events
                        for piece in event["choices"]
                        if piece["index"] == choice["index"]
                        for token_id in piece.get("token_ids", ())
                    ]
                    for choice in answer["choices"]
                ]
                assert ids == [choice["token_ids"] for choice in answer["choices"]]
        assert not engine.stats().pages_held_by_requests


@pytest.mark.asyncio
async def test_of_completions() -> None:
    prompts = st.lists(st.sampled_from(["json", "re", "é"]), min_size=1, max_size=3)
    more = st.fixed_dictionaries(
        {"prompt": prompts},
        optional={"logprobs": st.integers(0, 2)},
    )
    async with served(num_pages=256) as (engine, client):
        for body in _examples(BODIES, more, 25):
            body = {"model": "pyhelp", "seed": 1, "max_tokens": 12} | body
            answer = await post(client, "/v1/completions", body)
            events = await post(client, "/v1/completions", body | {"stream": True})
            whole = {choice["index"]: choice for choice in answer["choices"]}
            joined = completions_joined(events)
            for index, choice in joined.items():
                expected = whole[index]
                _round(choice)
                _round(expected)
                assert choice == expected, body
            assert joined.keys() == whole.keys()
        assert not engine.stats().pages_held_by_requests


def _round(choice: dict[str, Any]) -> None:
    """Round the log-probabilities of a choice: batches of other sizes add in another order."""
    if choice["logprobs"] is not None:
        logprobs = choice["logprobs"]
        logprobs["token_logprobs"] = [
            None if one is None else round(one, 3) for one in logprobs["token_logprobs"]
        ]
        logprobs["top_logprobs"] = [
            None if one is None else sorted(one) for one in logprobs["top_logprobs"]
        ]


def _examples(one: Any, other: Any, count: int) -> list[dict[str, Any]]:
    """Bodies that hypothesis draws, for servers that live longer than one example."""
    drawn: list[dict[str, Any]] = []

    @quick(count)
    @given(one, other)
    def draw(first: dict[str, Any], second: dict[str, Any]) -> None:
        drawn.append(first | second)

    draw()
    return drawn


@pytest.mark.asyncio
async def test_each_choice_that_calls_a_tool_ends_with_tool_calls() -> None:
    """Required calls are in `test_chat_completions.py`: their form would leave nothing to a
    script."""
    async with scripted(*ANSWERS) as (_, client):
        body = CHAT_BODY | {"messages": ASK, "tools": TOOLS, "n": 4}
        answer = await post(client, "/v1/chat/completions", body)
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert reasons == ["stop", "tool_calls", "tool_calls", "tool_calls"]
