"""Streams of events, checked one by one as the APIs document them, and folded into whole
answers."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["checked_message", "checked_response", "events_of", "without_ids"]

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def events_of(text: str) -> list[dict[str, Any]]:
    """Data of server-sent events, each with a type that is the event's name."""
    events: list[dict[str, Any]] = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def checked_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the events, and return the response at their end."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    first = events[0]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert [event["type"] in TERMINAL for event in events] == [False] * (len(events) - 1) + [True]
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["id"] == first["id"]
    items = checked_items(events[2:-1])
    assert response["output"] == items
    return response


def checked_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    rest = list(events)
    while rest:
        added = rest.pop(0)
        assert added["type"] == "response.output_item.added"
        item = added["item"]
        assert item["status"] == "in_progress"
        where = {"item_id": item["id"], "output_index": len(items)}
        assert added["output_index"] == len(items)
        kind = {
            "message": "output_text",
            "reasoning": "reasoning_text",
            "function_call": "function_call_arguments",
        }[item["type"]]
        if kind != "function_call_arguments":
            assert item["content"] == []
            where["content_index"] = 0
            part = rest.pop(0)
            assert part["type"] == "response.content_part.added"
            assert (part["part"]["type"], part["part"]["text"]) == (kind, "")
            assert where.items() <= part.items()
        text = ""
        while rest[0]["type"] == f"response.{kind}.delta":
            assert where.items() <= rest[0].items()
            assert rest[0]["delta"]
            text += rest.pop(0)["delta"]
        done = rest.pop(0)
        assert done["type"] == f"response.{kind}.done"
        assert where.items() <= done.items()
        if kind == "function_call_arguments":
            assert (done["arguments"], done["name"]) == (text, item["name"])
            whole = item | {"arguments": text}
        else:
            assert done["text"] == text
            part = rest.pop(0)
            assert part["type"] == "response.content_part.done"
            assert (part["part"]["type"], part["part"]["text"]) == (kind, text)
            assert where.items() <= part.items()
            whole = item | {"content": [part["part"]]}
        done = rest.pop(0)
        assert (done["type"], done["output_index"]) == ("response.output_item.done", len(items))
        assert done["item"] == whole | {"status": done["item"]["status"]}
        items.append(done["item"])
    assert all(item["status"] == "completed" for item in items[:-1])
    return items


def checked_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the events, and return their message."""
    rest = [event for event in events if event["type"] != "ping"]
    start = rest.pop(0)
    assert start["type"] == "message_start"
    message = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    while rest[0]["type"] == "content_block_start":
        begun = rest.pop(0)
        index, block = begun["index"], begun["content_block"]
        assert index == len(message["content"])
        field, kind, delta_field = {
            "text": ("text", "text_delta", "text"),
            "thinking": ("thinking", "thinking_delta", "thinking"),
            "tool_use": ("input", "input_json_delta", "partial_json"),
        }[block["type"]]
        assert not block[field]
        text = ""
        while rest[0]["type"] == "content_block_delta":
            event = rest.pop(0)
            assert (event["index"], event["delta"]["type"]) == (index, kind)
            assert event["delta"][delta_field]
            text += event["delta"][delta_field]
        assert rest.pop(0) == {"type": "content_block_stop", "index": index}
        if kind == "input_json_delta":
            try:
                block["input"] = json.loads(text)
            except ValueError:
                block["input"] = {}
        else:
            block[field] = text
        message["content"].append(block)
    delta, stop = rest
    assert delta["type"] == "message_delta"
    assert stop == {"type": "message_stop"}
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def without_ids(answer: Any) -> Any:
    """Copy of an answer without ids, times and usage, to compare it with another."""
    if isinstance(answer, list):
        return [without_ids(one) for one in answer]
    if isinstance(answer, dict):
        left_out = ("id", "call_id", "created_at", "completed_at", "usage")
        return {name: without_ids(one) for name, one in answer.items() if name not in left_out}
    return answer
