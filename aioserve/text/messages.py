"""Checks of chat messages from a sender: their fields and their sizes.

Fields are those of the OpenAI API. Sizes are checked before anything is copied or encoded, and no
more is read than may be there. A sequence without an end, or one that claims to be short, costs no
more than an honest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from aioserve.errors import InvalidPromptError, PromptTooLongError
from aioserve.isolation import shown
from aioserve.text.json_values import Reader, check_texts, parsed_arguments

__all__ = [
    "FIELDS",
    "FIELDS_OF",
    "MAX_ID_CHARS",
    "MAX_MESSAGES",
    "MAX_NAME_CHARS",
    "MAX_ROLE_CHARS",
    "Message",
    "read_messages",
    "validated",
]

Message = Mapping[str, Any]

MAX_MESSAGES = 10_000
"""Most messages of one prompt. Reading that many takes the event loop some 10 ms."""
MAX_ROLE_CHARS = 64
MEDIA = {"image": "images are", "audio": "audio is", "video": "videos are", "file": "files are"}
MAX_ID_CHARS = 256
"""Most characters of a tool call's id."""
MAX_NAME_CHARS = 256
"""Most characters of a function's name."""

FIELDS: tuple[str, ...] = ("role", "content", "name")
"""Fields of every message."""
FIELDS_OF: dict[str, tuple[str, ...]] = {
    "assistant": ("tool_calls", "reasoning_content", "reasoning"),
    "tool": ("tool_call_id",),
}
"""Fields by role, beside `FIELDS`."""
_MAX_FIELDS = 6


def validated(plain: list[dict[str, Any]], reader: Reader) -> list[dict[str, Any]]:
    """Copy what `read_messages` returned, with the JSON of tool calls' arguments parsed.

    Parsed arguments are objects, with the parts that are there if one was cut off. Arguments that
    are no JSON object stay text. `reader` counts what is parsed. Raises `InvalidPromptError` for
    text that can't be encoded as UTF-8, and for too many values. Takes as long as the messages are,
    so check long ones on a thread.
    """
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(plain):
        if "tool_calls" in message:
            with reader.at(index), reader.at("tool_calls"):
                calls = [
                    _parsed(reader, *numbered) for numbered in enumerate(message["tool_calls"])
                ]
            message = message | {"tool_calls": calls}
        for field, value in message.items():
            check_texts("prompt", f"messages[{index}][{field!r}]", value)
        checked.append(message)
    return checked


def read_messages(messages: Any, reader: Reader) -> list[dict[str, Any]]:
    """Check that `messages` is a non-empty list of messages; return a copy in Python's own classes.

    `reader` counts what is read. Each message has a `role` and a `content`: a str, or a list of
    parts {"type": "text", "text": str}, which are joined by line breaks. It may have a `name`, of
    its author or of the function. The assistant's may have `tool_calls`, beside which the content
    may be None or left out. They may also have `reasoning_content` (or `reasoning`, the same under
    another name). A tool's may have the `tool_call_id` that it answers.

    Raises `InvalidPromptError` naming the index and the field, and `PromptTooLongError` for too
    many messages or characters. Exceptions of a class of the sender's pass through.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidPromptError(f"messages must be a list, got {type(messages).__name__}")
    num_messages = len(messages)
    if num_messages == 0:
        raise InvalidPromptError("messages must not be empty")
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        num_messages = max(num_messages, index + 1)
        if num_messages > MAX_MESSAGES:
            raise PromptTooLongError(
                f"prompt has {num_messages} messages; {MAX_MESSAGES} are read at most",
                value=num_messages,
                limit=MAX_MESSAGES,
                unit="messages",
            )
        with reader.at(index):
            plain.append(_message(message, reader))
    return plain


def _message(message: Any, reader: Reader) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise reader.error(f"must be a dict, got {type(message).__name__}")
    if "role" not in message:
        raise reader.error("has no 'role'")
    with reader.at("role"):
        role = reader.text(message["role"], max_chars=MAX_ROLE_CHARS)
    more = FIELDS_OF.get(role, ())
    fields = set()
    for key in islice(message, _MAX_FIELDS + 1):
        if key not in FIELDS and key not in more:
            also = f"; of role {role!r} {', '.join(more)} are too" if more else ""
            raise reader.error(
                f"has the unsupported field {shown(key)}; only {', '.join(FIELDS)} are{also}"
            )
        fields.add(key)
    plain: dict[str, Any] = {"role": role}
    calls = message["tool_calls"] if "tool_calls" in fields else None
    if "content" in message:
        with reader.at("content"):
            plain["content"] = _content(message["content"], reader, may_be_none=bool(calls))
    elif not calls:
        raise reader.error("has no 'content'")
    if calls is not None:
        with reader.at("tool_calls"):
            calls = [
                _tool_call(*numbered, reader) for numbered in enumerate(reader.elements(calls))
            ]
        if calls:
            plain["tool_calls"] = calls
    for field in ("reasoning_content", "reasoning"):
        if field in fields and message[field] is not None:
            if "reasoning_content" in plain:
                raise reader.error("must have one of reasoning_content and reasoning, not both")
            with reader.at(field):
                plain["reasoning_content"] = reader.text(message[field])
    for field, max_chars in (("tool_call_id", MAX_ID_CHARS), ("name", MAX_NAME_CHARS)):
        if field in fields and message[field] is not None:
            with reader.at(field):
                plain[field] = reader.text(message[field], max_chars=max_chars)
    return plain


def _content(content: Any, reader: Reader, *, may_be_none: bool) -> str | None:
    if content is None and may_be_none:
        return None
    if isinstance(content, str):
        return reader.text(content)
    if not isinstance(content, list | tuple):
        raise reader.error(
            f"must be a str or a list of content parts, got {type(content).__name__}"
        )
    texts: list[str] = []
    for index, part in enumerate(reader.elements(content)):
        with reader.at(index):
            texts.append(_text_of_part(part, reader))
    if not texts:
        raise reader.error("must have a content part, got []")
    return "\n".join(texts)


def _text_of_part(part: Any, reader: Reader) -> str:
    fields = dict(reader.items(part))
    with reader.at("type"):
        if (kind := fields.get("type")) != "text":
            media = [MEDIA[word] for word in MEDIA if type(kind) is str and word in kind]
            why = f"; {media[0]} not supported" if media else ""
            raise reader.error(
                f"must be 'text', the only part that is supported, got {shown(kind)}{why}"
            )
    _check_names(fields, ("type", "text"), reader)
    with reader.at("text"):
        return reader.text(fields.get("text"))


def _tool_call(index: int, call: Any, reader: Reader) -> dict[str, Any]:
    """Copy a tool call. Arguments may be an object, or JSON of one, which isn't parsed here."""
    with reader.at(index):
        fields = _fields(call, ("id", "type", "function"), reader)
        plain: dict[str, Any] = {}
        if fields.get("id") is not None:
            with reader.at("id"):
                plain["id"] = reader.text(fields["id"], max_chars=MAX_ID_CHARS)
        if "type" in fields:
            with reader.at("type"):
                if fields["type"] != "function":
                    raise reader.error(f"must be 'function', got {shown(fields['type'])}")
                plain["type"] = "function"
        with reader.at("function"):
            function = _fields(fields.get("function"), ("name", "arguments"), reader)
            with reader.at("name"):
                name = reader.text(function.get("name"), max_chars=MAX_NAME_CHARS)
            with reader.at("arguments"):
                arguments = function.get("arguments")
                if not isinstance(arguments, str | Mapping | None):
                    raise reader.error(
                        f"must be a dict or JSON of one, got {type(arguments).__name__}"
                    )
                plain["function"] = {
                    "name": name,
                    "arguments": reader.value({} if arguments is None else arguments),
                }
        return plain


def _fields(value: Any, names: tuple[str, ...], reader: Reader) -> dict[str, Any]:
    """Return the fields of a mapping that has only `names`."""
    fields = dict(reader.items(value))
    _check_names(fields, names, reader)
    return fields


def _check_names(fields: Mapping[str, Any], names: tuple[str, ...], reader: Reader) -> None:
    for name in fields:
        if name not in names:
            raise reader.error(
                f"has the unsupported field {shown(name)}; only {', '.join(names)} are"
            )


def _parsed(reader: Reader, index: int, call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        with reader.at(index), reader.at("function"), reader.at("arguments"):
            arguments = parsed_arguments(arguments, reader)
    return call | {"function": call["function"] | {"arguments": arguments}}
