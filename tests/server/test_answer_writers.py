"""Items, blocks and their events, from any pieces of an answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from aioserve.server.anthropic.messages import BlockWriter
from aioserve.server.chat_parts.answering import Arguments, CallBegun, Content, Piece, Reasoning
from aioserve.server.openai.responses_api.response import ItemWriter
from tests.server.event_checks import checked_items, checked_message

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)
ids = st.integers(0, 10**9).map(lambda number: f"call_{number}")
runs = st.one_of(
    st.lists(st.builds(Content, texts), min_size=1, max_size=3),
    st.lists(st.builds(Reasoning, texts), min_size=1, max_size=3),
    st.builds(
        lambda call, pieces: [call, *pieces],
        st.builds(CallBegun, ids, st.sampled_from(["f", "g"])),
        st.lists(st.builds(Arguments, texts), max_size=3),
    ),
)
answers = st.lists(runs, max_size=6).map(lambda parts: [piece for part in parts for piece in part])


def plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def joined(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Expected kinds and texts, with neighbours of a kind joined."""
    found: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case CallBegun():
                found.append((piece.id, ""))
            case Arguments():
                found[-1] = found[-1][0], found[-1][1] + piece.text
            case Content() | Reasoning():
                kind = type(piece).__name__
                if found and found[-1][0] == kind:
                    found[-1] = kind, found[-1][1] + piece.text
                else:
                    found.append((kind, piece.text))
    return found


@given(answers, st.sampled_from(["completed", "incomplete"]))
def test_items_are_what_their_events_tell_and_what_was_written(pieces: Any, status: Any) -> None:
    writer = ItemWriter()
    events = [event for piece in pieces for event in writer.write(piece)]
    events += writer.finish(status)
    items = checked_items(plain(events))
    assert items == plain(writer.parts)
    assert items[-1]["status"] == status
    found = []
    for item in items:
        if item["type"] == "function_call":
            found.append((item["call_id"], item["arguments"]))
        else:
            kind = {"message": "Content", "reasoning": "Reasoning"}[item["type"]]
            found.append((kind, item["content"][0]["text"]))
    assert found == (joined(pieces) or [("Content", "")])
    assert len({item["id"] for item in items}) == len(items)


@given(answers)
def test_blocks_are_what_their_events_tell_and_what_was_written(pieces: Any) -> None:
    writer = BlockWriter()
    events = [event for piece in pieces for event in writer.write(piece)]
    events += writer.finish()
    start = {"type": "message_start", "message": {"content": [], "stop_reason": None, "usage": {}}}
    end = [{"type": "message_delta", "delta": {}, "usage": {}}, {"type": "message_stop"}]
    told = checked_message(plain([start, *events, *end]))["content"]
    content = plain(writer.parts)
    found, expected = [], []
    for block in content:
        match block["type"]:
            case "text":
                found.append(("Content", block["text"]))
            case "thinking":
                found.append(("Reasoning", block["thinking"]))
            case _:
                found.append((block["id"], block["input"]))
    for kind, text in joined(pieces):
        expected.append((kind, text if kind in ("Content", "Reasoning") else parsed(text)))
    assert found == expected
    # Clients read JSON that is no object in their own ways.
    same = [block for block in told if block["type"] != "tool_use"]
    assert same == [block for block in content if block["type"] != "tool_use"]
    broken = [text for kind, text in joined(pieces) if kind.startswith("call_")]
    assert writer.has_broken_call == any(not is_object(text) for text in broken)


def is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def parsed(text: str) -> Any:
    return json.loads(text) if is_object(text) else {}
