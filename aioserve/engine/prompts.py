"""Prompts as callers give them: their kinds, token ids as arrays, and scored continuations.

A prompt may be an object of any class, which raises, lies about its length or never ends. Its
length is asked for once. Token ids are copied up to that length, and the copy is checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from numbers import Integral
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import counted, plain_int, plain_str, shown
from aioserve.drafting.drafter import NO_IDS
from aioserve.errors import AioserveError, InvalidPromptError, PromptTooLongError
from aioserve.execution.runner import ModelLimits
from aioserve.text.messages import Message

__all__ = [
    "Continuation",
    "ContinuedPrompt",
    "Prompt",
    "check_single",
    "checked_continuation",
    "checked_ids",
    "holds_prompts",
    "kind_of",
    "listed",
    "too_long",
]

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]] | Sequence[Message]
Continuation = str | Sequence[int] | npt.NDArray[np.integer[Any]]

IDS_AT_ONCE = 16_384
_LISTS = str | Sequence | np.ndarray
"""Classes of prompts that are no token ids. A sequence of these is a sequence of prompts."""
_KINDS = {"prompt": "a str, token ids or messages", "continuation": "a str or token ids"}


def kind_of(prompt: Any, argument: str = "prompt") -> Literal["text", "messages", "ids"]:
    """Return the kind of a prompt. Raises `InvalidPromptError` for other objects."""
    kind = type(prompt)
    if issubclass(kind, str):
        return "text"
    if issubclass(kind, np.ndarray):
        return "ids"
    with _reading(argument):
        if not issubclass(kind, Sequence) or issubclass(kind, bytes | bytearray | memoryview):
            raise InvalidPromptError(
                f"{argument} must be {_KINDS[argument]}, got {kind.__name__:.100}",
                argument=argument,
                value=prompt,
            )
        first = prompt[0] if len(prompt) else None
        if issubclass(type(first), Mapping):
            return "messages"
        if issubclass(type(first), _LISTS):
            raise _nested(argument, prompt, first)
        return "ids"


def listed(argument: str, values: Any, most: int) -> list[Any]:
    """Copy the entries of a sequence of any class, perhaps endless: 1 to `most`.

    Raises `InvalidPromptError`.
    """
    kind = type(values)
    with _reading(argument):
        if not issubclass(kind, Sequence) or issubclass(kind, str | bytes | bytearray | memoryview):
            raise InvalidPromptError(
                f"{argument} must be a sequence of them, got {shown(values)}",
                argument=argument,
                value=values,
            )
        entries = list(islice(values, most + 1))
    if not 0 < len(entries) <= most:
        got = f"more than {most}" if entries else "none"
        raise InvalidPromptError(
            f"{argument} must be 1 to {most}, got {got}",
            argument=argument,
            value=values,
            limit=most if entries else 1,
        )
    return entries


def holds_prompts(prompts: Any) -> bool:
    """True for a sequence of prompts, False for a single one, judged by its first entry."""
    with _reading("prompts"):
        kind = type(prompts)
        if issubclass(kind, str | np.ndarray | bytes | bytearray | memoryview):
            return False
        if not issubclass(kind, Sequence) or not len(prompts):
            return False
        return issubclass(type(prompts[0]), _LISTS)


def check_single(argument: str, prompt: Any) -> None:
    """Raise `InvalidPromptError` for a sequence of prompts in place of one."""
    if holds_prompts(prompt):
        with _reading(argument):
            raise _nested(argument, prompt, prompt[0])


def _nested(argument: str, prompt: Any, first: Any) -> InvalidPromptError:
    return InvalidPromptError(
        f"{argument} must be {_KINDS.get(argument, _KINDS['prompt'])}, got "
        f"{type(prompt).__name__:.100} of {type(first).__name__:.100}: {shown(prompt)}",
        argument=argument,
        value=prompt,
    )


def too_long(num_tokens: int, max_model_len: int, argument: str = "prompt") -> PromptTooLongError:
    """Make the error for a prompt that leaves no room for a completion."""
    return PromptTooLongError(
        f"{argument} has {counted(num_tokens, 'token')}; max_model_len is {max_model_len}, and at "
        "least one token must be left for the answer",
        argument=argument,
        value=num_tokens,
        limit=max_model_len - 1,
    )


def checked_ids(
    prompt: Any, *, vocab_size: int, max_model_len: int, argument: str = "prompt"
) -> npt.NDArray[np.int32]:
    """Return the token ids of a sequence or array of ints as int32. Errors call it `argument`.

    Raises `InvalidPromptError`, naming the first entry that is no id of the vocabulary. Raises
    `PromptTooLongError` unless one token of the context is left for the answer.
    """
    with _reading(argument):
        ids = _copied(prompt, max_model_len, argument)
    checked = np.empty(len(ids), np.int32)
    for start in range(0, len(ids), IDS_AT_ONCE):
        part = ids[start : start + IDS_AT_ONCE]
        found = part if isinstance(part, np.ndarray) else _as_array(part)
        if found is None or ((found < 0) | (found >= vocab_size)).any():
            found = _one_by_one(part, start, vocab_size, argument)
        checked[start : start + len(part)] = found
    return checked


def _copied(prompt: Any, max_model_len: int, argument: str) -> list[Any] | npt.NDArray[Any]:
    array = np.asarray(prompt) if issubclass(type(prompt), np.ndarray) else None
    if array is not None and array.ndim != 1:
        raise InvalidPromptError(
            f"{argument} must be {_KINDS[argument]}, got ndarray of shape {shown(array.shape)}",
            argument=argument,
            value=prompt,
        )
    length = len(prompt) if array is None else len(array)
    if length == 0:
        raise InvalidPromptError(
            f"{argument} must not be empty, got {shown(prompt)}", argument=argument
        )
    if length >= max_model_len:
        raise too_long(length, max_model_len, argument)
    if array is not None:
        return array.copy() if array.dtype.kind in "iu" else list(array)
    items = list(islice(prompt, length + 1))
    if len(items) != length:
        raise InvalidPromptError(
            f"{argument} must have as many token ids as its length says, {length}, got "
            f"{'more' if len(items) > length else len(items)}",
            argument=argument,
        )
    return items


def _as_array(items: list[Any]) -> npt.NDArray[np.int64] | None:
    """Convert to an array; None if an item isn't an int of 64 bits."""
    try:
        with suppress(msgspec.ValidationError):  # Python's own ints, in half the time
            return np.fromiter(msgspec.convert(items, list[int]), np.int64, len(items))
        if all(kind is not bool and issubclass(kind, Integral) for kind in set(map(type, items))):
            return np.fromiter(map(operator.index, items), np.int64, len(items))
    except KeyboardInterrupt:
        raise
    except BaseException:  # an item may be of any class
        pass
    return None


def _one_by_one(items: Any, start: int, vocab_size: int, argument: str) -> list[int]:
    """Check ids one by one. Raises `InvalidPromptError` for the first bad one; `start` is the
    index of the first item."""
    ids: list[int] = []
    for index, item in enumerate(items, start):
        number = plain_int(item)
        if number is None or not 0 <= number < vocab_size:
            value = item if number is None else number
            limit = None if number is None else 0 if number < 0 else vocab_size
            raise InvalidPromptError(
                f"token ids of the {argument} must be ints in [0, {vocab_size}), "
                f"got {shown(value)} at index {index}",
                argument=argument,
                value=value,
                limit=limit,
            )
        ids.append(number)
    return ids


class PredictedPrompt:
    """A prompt, and a text that its answer will resemble."""

    def __init__(self, prompt: Any, prediction: str) -> None:
        self.prompt: Any = prompt
        """Prompt for an `Encoder`, or ids as an int32 array."""
        self.prediction: str = prediction
        self.predicted_ids: npt.NDArray[np.int32] = NO_IDS
        """Ids of the prediction, without special tokens, once it is encoded."""


class ContinuedPrompt:
    """A checked prompt and a checked continuation, which become one list of token ids.

    The prompt is encoded as in every request. The continuation is encoded by itself, without
    special tokens. So the border always lies between two tokens.
    """

    def __init__(self, prompt: Any, continuation: str | npt.NDArray[np.int32]) -> None:
        self.prompt: Any = prompt
        """Text, messages, or ids as an int32 array."""
        self.prompt_ids: npt.NDArray[np.int32] | None = None
        """Ids of the prompt, once it is encoded."""
        self._continuation = continuation
        self._continuation_ids = np.empty(0, np.int32)

    @property
    def continuation_ids(self) -> tuple[int, ...]:
        """Ids of the continuation; empty until it is encoded."""
        return tuple(self._continuation_ids.tolist())

    @property
    def parts(self) -> tuple[Any, Any]:
        return self.prompt, self._continuation

    def encode(self, encode: Callable[..., list[int]], max_tokens: int) -> npt.NDArray[np.int32]:
        """Return the ids of both, int32.

        `encode(part, add_special_tokens=)` encodes parts that aren't ids yet. Raises
        `PromptTooLongError` for more than `max_tokens`.
        """
        ids, more = self.prompt, self._continuation
        if not isinstance(ids, np.ndarray):
            ids = np.array(encode(ids), np.int32)
        if not len(ids):
            raise InvalidPromptError("prompt must not be empty, got a text without tokens")
        if not isinstance(more, np.ndarray):
            try:
                more = np.array(encode(more, add_special_tokens=False), np.int32)
            except PromptTooLongError as error:
                if error.unit != "tokens" or error.value is None:
                    raise
                raise _too_long(len(ids), error.value, max_tokens) from None
        if not len(more):
            raise InvalidPromptError(
                "continuation must not be empty, got a text without tokens",
                argument="continuation",
            )
        if len(ids) + len(more) > max_tokens:
            raise _too_long(len(ids), len(more), max_tokens)
        self.prompt_ids, self._continuation_ids = ids, more
        return np.concatenate([ids, more])

    def request_fields(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the `Request` fields that score the continuation: see `Intake.submit`."""
        if self.prompt_ids is None:
            raise ValueError("a prompt that isn't encoded has no border")
        return {"score_from": len(self.prompt_ids), "answers": False}


def checked_continuation(
    value: Any, limits: ModelLimits, check_text: Callable[[str], None]
) -> str | npt.NDArray[np.int32]:
    """Return non-empty text that `check_text` accepts, or ids as an int32 array.

    Raises `InvalidPromptError`, and what `check_text` raises.
    """
    kind = kind_of(value, "continuation")
    if kind == "messages":
        raise InvalidPromptError(
            "continuation must be a str or token ids, got messages",
            argument="continuation",
            value=value,
        )
    if kind == "text":
        text = plain_str(value)
        if not text:
            raise InvalidPromptError(
                "continuation must not be empty, got ''", argument="continuation", value=text
            )
        check_text(text)
        return text
    return checked_ids(
        value,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        argument="continuation",
    )


def _too_long(prompt: int, continuation: int, most: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"prompt and continuation have {prompt} and {counted(continuation, 'token')}; "
        f"together they may have {most}, one less than max_model_len",
        value=prompt + continuation,
        limit=most,
    )


@contextmanager
def _reading(argument: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, AioserveError):
        raise
    except BaseException as error:
        raise InvalidPromptError(
            f"{argument} can't be read: {shown(error)}", argument=argument
        ) from error
