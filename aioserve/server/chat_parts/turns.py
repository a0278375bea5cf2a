"""From the items of an API to the messages that `Engine.chat` takes.

APIs that tell a turn of the assistant in items (its reasoning, its text, its tool calls, one by
one) become one message of it here. Each message remembers which part of the body it came from, so
that an error about it names the place that the client knows.
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
"""How the engine names a place in messages."""
TOOL = re.compile(r"\btools\[(\d+)\]\['function'\]\['name'\]")
"""And the name of a tool, which stands in the tool itself here."""


class Turns:
    """Messages as they are put together. `place` is always where in the body a part stands."""

    def __init__(self, *, knows_developer: bool = False) -> None:
        """`knows_developer`: the model's template knows the role of that name."""
        self._knows_developer = knows_developer
        self._messages: list[dict[str, Any]] = []
        self._joined: dict[str, tuple[str, list[str]]] = {}
        """Texts of fields of the last message that aren't written yet, and what goes between."""
        self._places: list[str] = []
        """Places of the first part of each message."""
        self._calls: dict[tuple[int, int], tuple[str, str]] = {}
        """Where the calls of each message stand, and what their arguments are called there."""
        self._names: dict[str, str] = {}
        """Names of the functions that were called, by the ids of calls."""
        self._open: dict[str, str] = {}
        """Where the calls without a result stand, by their ids."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All that there are so far."""
        self._write_joined()
        return self._messages

    def system(self, text: str, place: str) -> None:
        """Join system messages that begin the conversation: many templates take no second one."""
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
        """`joined`: to a user's turn that it follows."""
        if joined and self._last_is("user"):
            self._join("content", text, "\n")
        else:
            self._add("user", place, content=text)

    def text(self, text: str, place: str) -> None:
        """Add text that the assistant wrote."""
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
        """`arguments`: an object, or JSON of one, which needs no result where it was cut off.
        Raises `ApiError` for an id that was there."""
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
        """Raises `ApiError` where no call before has the id."""
        name = self._names.get(call_id)
        if name is None:
            raise ApiError(400, f"{place}: no call before has the id {call_id!r:.300}", param=place)
        self._open.pop(call_id, None)
        self._add("tool", place, content=text, tool_call_id=call_id, name=name)

    def check_results(self) -> None:
        """Raises `ApiError` where a call has no result behind it."""
        for call_id, place in self._open.items():
            raise without_result(call_id, place)

    def placed(self, message: str) -> tuple[str, str | None]:
        """`message` of an error of the engine's with places in the body for those in messages, and
        the first of these."""
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
        """Join the texts of the last message, once: each time would take the square of their
        number."""
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
    """Whether arguments of a call, as JSON, seem to end before their end: the engine, which keeps
    what is there of them, knows for certain. Takes no longer than to parse them."""
    begun = text.lstrip().startswith("{")
    try:
        msgspec.json.decode(text.rstrip(_NUMBER_CHARS) if begun else "{}")
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except (UnicodeEncodeError, RecursionError):
        return False
    return False
