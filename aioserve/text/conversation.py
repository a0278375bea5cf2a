"""Input of a chat template: messages, tools, and arguments of the template's own.

Knows which strings a caller wrote, and which are words of the API that templates look for. Must not
know tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from aioserve.arguments import boolean, check
from aioserve.errors import AioserveError, InvalidPromptError, InvalidRequestError
from aioserve.isolation import shown
from aioserve.text.json_values import Reader, check_texts
from aioserve.text.messages import MAX_NAME_CHARS, read_messages, validated

__all__ = ["MAX_TEMPLATE_KWARGS", "MAX_TOOLS", "Conversation", "conversation_of"]

MAX_TOOLS = 1024
MAX_TEMPLATE_KWARGS = 64
MAX_KWARG_CHARS = 64
RESERVED = frozenset(
    """
    messages tools documents add_generation_prompt continue_final_message chat_template
    tokenize raise_exception strftime_now namespace dict range loop self true false none
    """.split()  # noqa: SIM905
)
"""Names that mean something else to a template."""

# Keys that templates look for; as part of a special token they are of no use to anyone.
_KEYS = frozenset(
    """
    role content reasoning_content thinking tool_calls tool_call_id id type function
    name arguments description parameters properties required items enum default format
    anyOf oneOf allOf not const title nullable additionalProperties minimum maximum
    minItems maxItems minLength maxLength pattern strict return returns response $ref
    $defs definitions
    """.split()  # noqa: SIM905
)
_TYPES = frozenset(
    """
    function string number integer boolean object array null
    """.split()  # noqa: SIM905
)
_IDS = ("id", "tool_call_id")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Conversation(msgspec.Struct, frozen=True):
    """Input to render, in Python's own classes: plain values of JSON."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    """True if the template opens the assistant's turn."""
    continue_final_message: bool = False
    """True if the last message's turn is left open."""
    num_chars: int = 0
    num_values: int = 0
    """Number of values beside the messages."""

    @property
    def num_items(self) -> int:
        """Number of items that may cost a template a step of work each."""
        return len(self.messages) + self.num_values

    def validated(self) -> Conversation:
        """Return the conversation ready to be rendered: see `messages.validated`.

        Takes time in proportion to its text.
        """
        check_texts("tools", "tools", self.tools)
        check_texts("chat_template_kwargs", "chat_template_kwargs", self.template_kwargs)
        reader = Reader("messages")
        messages = validated(self.messages, reader)
        num_values = self.num_values + reader.num_values
        return msgspec.structs.replace(self, messages=messages, num_values=num_values)

    def texts(self) -> Iterator[str]:
        """Yield every str that a caller wrote, except roles."""
        for message in self.messages:
            for field, value in message.items():
                if field != "role":
                    yield from _texts(value)
        yield from _texts(self.tools)
        yield from _texts(self.template_kwargs)

    def mapped(
        self,
        text: Callable[[str], str],
        *,
        role: Callable[[str], str] = str,
        identifier: Callable[[str], str] | None = None,
        key: Callable[[str, int], str] | None = None,
    ) -> Conversation:
        """Return a copy with other strings for those that a caller wrote.

        `key` is given a key and its index in the object. Keys and ids of tool calls are treated
        like other text if `key` and `identifier` are None.
        """
        identifier = identifier or text
        key = key or (lambda name, index: text(name))

        def value_of(value: Any, under: str = "") -> Any:
            if isinstance(value, str):
                if under == "type" and value in _TYPES:
                    return value
                return identifier(value) if under in _IDS else text(value)
            if isinstance(value, dict):
                return {
                    name if name in _KEYS else key(name, index): value_of(entry, name)
                    for index, (name, entry) in enumerate(value.items())
                }
            if isinstance(value, list):
                return [value_of(entry, under) for entry in value]
            return value

        return msgspec.structs.replace(
            self,
            messages=[
                {
                    field: role(value) if field == "role" else value_of(value, field)
                    for field, value in message.items()
                }
                for message in self.messages
            ],
            tools=value_of(self.tools),
            template_kwargs={name: value_of(value) for name, value in self.template_kwargs.items()},
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield key
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


def conversation_of(
    messages: Any,
    *,
    tools: Any = None,
    chat_template_kwargs: Any = None,
    add_generation_prompt: Any = True,
    continue_final_message: Any = False,
    max_chars: int | None = None,
) -> Conversation:
    """Check what a caller gives and copy it: at most `max_chars` characters in all.

    `tools` are those of the OpenAI API, {"type": "function", "function": {"name": str, ...}} each.

    Raises `InvalidPromptError` naming the argument and the place in it. Raises `PromptTooLongError`
    for too many messages or characters, and `InvalidRequestError` for flags that contradict each
    other.
    """
    check(InvalidPromptError, "add_generation_prompt", add_generation_prompt, boolean)
    check(InvalidPromptError, "continue_final_message", continue_final_message, boolean)
    reader = Reader("messages", max_chars)
    try:
        plain = read_messages(messages, reader)
        reader.argument = "tools"
        plain_tools = _tools(tools, reader)
        reader.argument = "chat_template_kwargs"
        kwargs = _kwargs(chat_template_kwargs, reader)
    except AioserveError:
        raise
    except Exception as error:  # raised by a class of the sender's
        raise reader.error(f"can't be read: {shown(error)}") from error
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message=True goes with add_generation_prompt=False alone: a turn "
                "is either opened or left open",
                argument="continue_final_message",
                value=True,
            )
        if not plain[-1].get("content"):
            raise InvalidRequestError(
                "continue_final_message needs a last message with content",
                argument="continue_final_message",
                value=True,
            )
    return Conversation(
        plain,
        plain_tools,
        kwargs,
        add_generation_prompt,
        continue_final_message,
        reader.num_chars,
        reader.num_values,
    )


def _tools(tools: Any, reader: Reader) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    elements = reader.elements(tools)
    if len(elements) > MAX_TOOLS:
        raise reader.error(
            f"must be at most {MAX_TOOLS}, got more", value=len(elements), limit=MAX_TOOLS
        )
    plain: list[dict[str, Any]] = []
    for index, tool in enumerate(elements):
        with reader.at(index):
            copy = reader.value(tool)
            if not isinstance(copy, dict):
                raise reader.error(f"must be a dict, got {type(tool).__name__}")
            if copy.get("type") != "function":
                with reader.at("type"):
                    raise reader.error(f"must be 'function', got {shown(copy.get('type'))}")
            with reader.at("function"):
                if not isinstance(function := copy.get("function"), dict):
                    raise reader.error(f"must be a dict, got {type(function).__name__}")
                with reader.at("name"):
                    name = function.get("name")
                    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
                        raise reader.error(
                            f"must be a str of 1 to {MAX_NAME_CHARS} characters, got {shown(name)}",
                            value=name,
                            limit=MAX_NAME_CHARS,
                        )
            plain.append(copy)
    return plain or None


def _kwargs(kwargs: Any, reader: Reader) -> dict[str, Any]:
    if kwargs is None:
        return {}
    items = reader.items(kwargs)
    if len(items) > MAX_TEMPLATE_KWARGS:
        raise reader.error(
            f"must be at most {MAX_TEMPLATE_KWARGS}, got more",
            value=len(items),
            limit=MAX_TEMPLATE_KWARGS,
        )
    plain: dict[str, Any] = {}
    for name, value in items:
        if not _NAME.fullmatch(name) or len(name) > MAX_KWARG_CHARS or name in RESERVED:
            raise reader.error(
                f"must have names of at most {MAX_KWARG_CHARS} letters, digits and underscores "
                f"that mean nothing else to a template, got {shown(name)}",
                value=name,
            )
        with reader.at(name):
            plain[name] = reader.value(value)
    return plain
