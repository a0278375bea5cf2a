"""Chat messages as their sender gave them: what may be in them, and how much.

Sizes are looked at before anything is copied or encoded, and no more is looked at than may be
there: a sequence without an end, or one that says it is short, costs no more than an honest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from aioserve.errors import AioserveError, InvalidPromptError, PromptTooLongError
from aioserve.isolation import shown

__all__ = ["MAX_MESSAGES", "MAX_ROLE_CHARS", "plain_messages", "validate_messages"]

MAX_MESSAGES = 10_000
"""Of one prompt. To look at as many takes the event loop some 10 ms."""
MAX_ROLE_CHARS = 64

_FIELDS = ("role", "content")
_PIECE_CHARS = 2**16


def validate_messages(messages: Any, *, max_chars: int | None = None) -> list[dict[str, str]]:
    """As `plain_messages`; raises `InvalidPromptError` also for what can't be encoded as UTF-8.
    Takes as long as the messages are, so long ones are for a thread."""
    plain = plain_messages(messages, max_chars=max_chars)
    for index, message in enumerate(plain):
        for field, text in message.items():
            _check_utf8(f"messages[{index}][{field!r}]", text)
    return plain


def plain_messages(messages: Any, *, max_chars: int | None = None) -> list[dict[str, str]]:
    """Check that `messages` is a non-empty list of {"role": str, "content": str}, of at most
    `max_chars` characters in all; a copy of it, in classes of Python's own.

    Raises `InvalidPromptError` naming the index and the field, `PromptTooLongError` for too many
    messages or characters.
    """
    try:
        return _plain(messages, max_chars)
    except AioserveError:
        raise
    except Exception as error:  # raised by a class of the sender's
        raise InvalidPromptError(f"messages can't be read: {shown(error)}") from error


def _plain(messages: Any, max_chars: int | None) -> list[dict[str, str]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidPromptError(f"messages must be a list, got {type(messages).__name__}")
    num_messages = len(messages)
    if num_messages == 0:
        raise InvalidPromptError("messages must not be empty")
    plain: list[dict[str, str]] = []
    chars = 0
    for index, message in enumerate(messages):
        num_messages = max(num_messages, index + 1)
        if num_messages > MAX_MESSAGES:
            raise PromptTooLongError(
                f"prompt has {num_messages} messages; {MAX_MESSAGES} are read at most",
                value=num_messages,
                limit=MAX_MESSAGES,
                unit="messages",
            )
        texts = _texts(index, message)
        chars += sum([str.__len__(text) for text in texts])
        if max_chars is not None and chars > max_chars:
            raise PromptTooLongError(
                f"prompt has {chars} characters up to messages[{index}]; {max_chars} are read at "
                "most",
                value=chars,
                limit=max_chars,
                unit="characters",
            )
        # Of a subclass, what it holds and not what it says.
        role, content = [text if type(text) is str else str.__str__(text) for text in texts]
        plain.append({"role": role, "content": content})
    return plain


def _texts(index: int, message: Any) -> list[str]:
    """Role and content, as they are."""
    if not isinstance(message, Mapping):
        raise InvalidPromptError(f"messages[{index}] must be a dict, got {type(message).__name__}")
    texts: list[str] = []
    for field in _FIELDS:
        if field not in message:
            raise InvalidPromptError(f"messages[{index}] has no {field!r}")
        value = message[field]
        if not isinstance(value, str):
            raise InvalidPromptError(
                f"messages[{index}][{field!r}] must be a str, got {type(value).__name__}"
            )
        texts.append(value)
    role_chars = str.__len__(texts[0])
    if role_chars > MAX_ROLE_CHARS:
        raise InvalidPromptError(
            f"messages[{index}]['role'] must have at most {MAX_ROLE_CHARS} characters, "
            f"got {role_chars}",
            value=role_chars,
            limit=MAX_ROLE_CHARS,
        )
    for key in islice(message, len(_FIELDS) + 1):
        if key not in _FIELDS:
            raise InvalidPromptError(
                f"messages[{index}] has the unsupported field {shown(key)}; only role and content "
                "are"
            )
    return texts


def _check_utf8(name: str, text: str) -> None:
    if text.isascii():
        return
    for start in range(0, len(text), _PIECE_CHARS):  # other threads run between two of them
        try:
            text[start : start + _PIECE_CHARS].encode()
        except UnicodeEncodeError as error:
            raise InvalidPromptError(
                f"{name} can't be encoded as UTF-8: {text[start + error.start]!r} at "
                f"{start + error.start}: {error.reason}"
            ) from None
