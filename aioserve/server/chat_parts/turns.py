"""Conversion of an API's items to the messages of `Engine.chat`.

Some APIs split a turn of the assistant into items: its reasoning, its text and its tool calls. They
become one message here. Each message remembers its place in the body, so that errors name a place
that the client knows.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from aioserve.server.errors import ApiError

__all__ = ["Turns", "is_cut_off", "without_result"]

_NUMBER_CHARS = "0123456789.+-eE"

MESSAGE = re.compile(
    r"\bmessages\[(?P<message>\d+)\]"
    r"(?:\['tool_calls'\]\[(?P<call>\d+)\]\['function'\](?:\['(?P<field>\w+)'\])?)?"
)
"""Place in messages, as the engine's errors name it."""
TOOL = re.compile(r"\btools\[(\d+)\]\['function'\]\['name'\]")
"""Name of a tool, as the engine's errors name it. In bodies here, it is in the tool itself."""


class Turns:
    """Messages as they are put together. `place` is always the place of a part in the body."""

    def __init__(self, *, knows_developer: bool = False) -> None:
        """`knows_developer` is true if the model's template knows the role of that name."""
        self._knows_developer = knows_developer
        self._messages: list[dict[str, Any]] = []
        self._joined: dict[str, tuple[str, list[str]]] = {}
        """Texts of fields of the last message that aren't joined yet, with their separators."""
        self._places: list[str] = []
        """Place of the first part of each message."""
        self._calls: dict[tuple[int, int], tuple[str, str]] = {}
        """Place of each call, and the name of its arguments there."""
        self._names: dict[str, str] = {}
        """Names of the functions that were called, by the ids of calls."""
        self._open: dict[str, str] = {}
        """Places of the calls without a result, by their ids."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages so far."""
        self._write_joined()
        return self._messages

    def system(self, text: str, place: str) -> None:
        """Add a system message. At the beginning of a conversation they are joined, as many
        templates take only one."""
        if len(self._messages) == 1 and self._last_is("system"):
            self._join("content", text, "\n\n")
        else:
            self._add("system", place, content=text)

    def developer(self, text: str, place: str) -> None:
        if self._knows_developer:
            self._add("developer", place, content=text)
        else:
            self.system(text, place)

    def user(self, text: str, place: str, *, joined: bool = False) -> None:
        """Add a message of the user. `joined` adds the text to the user's message before, if there
        is one."""
        if joined and self._last_is("user"):
            self._join("content", text, "\n")
        else:
            self._add("user", place, content=text)

    def text(self, text: str, place: str) -> None:
        """Add text of the assistant."""
        self._assistant(place)
        self._join("content", text, "\n")

    def reasoning(self, text: str, place: str) -> None:
        self._assistant(place)
        self._join("reasoning_content", text, "\n")

    def call(
        self,
        call_id: str,
        name: str,
        arguments: str | dict[str, Any],
        place: str,
        *,
        arguments_field: str,
        needs_result: bool = True,
    ) -> None:
        """Add a tool call. `arguments` are an object or its JSON, which needs no result if it was
        cut off. Raises `ApiError` for an id that is in use."""
        if call_id in self._names:
            raise ApiError(400, f"{place}: the id {call_id!r:.300} is taken", param=place)
        self._names[call_id] = name
        if needs_result and not (isinstance(arguments, str) and is_cut_off(arguments)):
            self._open[call_id] = place
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        calls = self._assistant(place).setdefault("tool_calls", [])
        self._calls[len(self._messages) - 1, len(calls)] = place, arguments_field
        calls.append(call)

    def result(self, call_id: str, text: str, place: str) -> None:
        """Add the result of a call. Raises `ApiError` if no call before has the id."""
        name = self._names.get(call_id)
        if name is None:
            raise ApiError(400, f"{place}: no call before has the id {call_id!r:.300}", param=place)
        self._open.pop(call_id, None)
        self._add("tool", place, content=text, tool_call_id=call_id, name=name)

    def check_results(self) -> None:
        """Raise `ApiError` if a call has no result after it."""
        for call_id, place in self._open.items():
            raise without_result(call_id, place)

    def placed(self, message: str) -> tuple[str, str | None]:
        """Replace the places in a `message` of the engine by places in the body. Returns the
        message, and the first place, or None."""
        message = TOOL.sub(r"tools[\1].name", message)
        found = MESSAGE.search(message)
        if found is None:
            return message, None
        place = self._place(found)
        return message[: found.start()] + place + message[found.end() :], place

    def _place(self, found: re.Match[str]) -> str:
        index = int(found["message"])
        if found["call"] is None:
            return self._places[index] if index < len(self._places) else found[0]
        called = self._calls.get((index, int(found["call"])))
        if called is None:
            return found[0]
        place, arguments = called
        field = arguments if found["field"] == "arguments" else found["field"]
        return f"{place}.{field}" if field else place

    def _assistant(self, place: str) -> dict[str, Any]:
        if not self._last_is("assistant"):
            self._add("assistant", place, content="")
        return self._messages[-1]

    def _last_is(self, role: str) -> bool:
        return bool(self._messages) and self._messages[-1]["role"] == role

    def _join(self, field: str, text: str, between: str) -> None:
        before = self._messages[-1].get(field) or ""
        _, parts = self._joined.setdefault(field, (between, [before]))
        if parts == [""]:
            parts[0] = text
        else:
            parts.append(text)

    def _write_joined(self) -> None:
        """Join the texts of the last message, once: joining each time would take the square of
        their number."""
        for field, (between, parts) in self._joined.items():
            self._messages[-1][field] = between.join(parts)
        self._joined.clear()

    def _add(self, role: str, place: str, **fields: Any) -> None:
        self._write_joined()
        self._messages.append({"role": role, **fields})
        self._places.append(place)


def without_result(call_id: str, place: str) -> ApiError:
    message = f"{place}: the call {call_id!r:.300} must have a result behind it, and has none"
    return ApiError(400, message, param=place)


def is_cut_off(text: str) -> bool:
    """Return true if a call's arguments, as JSON, seem to end early. The engine, which keeps their
    beginning, knows for certain. Takes as long as parsing them."""
    begun = text.lstrip().startswith("{")
    try:
        msgspec.json.decode(text.rstrip(_NUMBER_CHARS) if begun else "{}")
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except (UnicodeEncodeError, RecursionError):
        return False
    return False
