"""Turns that are put together from many parts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aioserve.server.chat_parts.turns import Turns

TEXTS = st.lists(
    st.tuples(st.sampled_from(["content", "reasoning_content"]), st.sampled_from("ab|"))
)


def joined(texts: list[tuple[str, str]]) -> dict[str, Any]:
    """Message of these texts, each joined to all before it."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for field, text in texts:
        before = message.get(field)
        message[field] = f"{before}\n{text}" if before else text
    return message


@given(texts=TEXTS, read_at=st.integers(0, 5))
def test_texts_of_a_turn_are_joined_in_their_order(
    texts: list[tuple[str, str]], read_at: int
) -> None:
    turns, written = Turns(), [(field, text.strip("|")) for field, text in texts]
    for index, (field, text) in enumerate(written):
        if index == read_at:
            assert turns.messages == ([joined(written[:index])] if index else [])
        (turns.text if field == "content" else turns.reasoning)(text, "here")
    turns.user("c", "there")
    assert turns.messages[:-1] == ([joined(written)] if written else [])


def test_texts_of_a_turn_are_joined_once() -> None:
    turns = Turns()
    turns.text("a", "here")
    message = turns.messages[0]
    for _ in range(3):
        turns.text("b", "here")
        turns.reasoning("c", "here")
        assert message == {"role": "assistant", "content": "a"}
    turns.user("d", "there")
    assert message["content"] == "a\nb\nb\nb"
    assert message["reasoning_content"] == "c\nc\nc"
