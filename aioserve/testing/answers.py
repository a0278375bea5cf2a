"""Answers that a test writes for a `FakeModel`: the choice of one for each request, and its form.

Knows requests as their callers gave them. Must not know tokens, steps or pages.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.request import SamplingParams

__all__ = ["Answers", "FakeRequest", "GivenAnswers", "NoAnswerError", "failed"]

logger: logging.Logger = logging.getLogger(__name__)

Answer = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""Text, a call `{"name": ..., "arguments": ...}`, or a list of both in their order."""
GivenAnswers = (
    str | Mapping[str, Any] | Sequence[Answer] | Iterator[Answer] | Callable[[Any], Answer]
)
CALL_KEYS = {"name", "arguments"}


class NoAnswerError(Exception):
    """A request gets no answer; it ends with this message, which says why."""


class FakeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for an answer, as the tested program sent it."""

    messages: list[dict[str, Any]] | None
    """Messages, as `Engine.chat` takes them; None if the prompt is no chat."""
    prompt: str | None
    """Text of a prompt of text or token ids; None for messages."""
    tools: list[dict[str, Any]]
    """Tools on offer, those of the OpenAI API; empty without any."""
    chat_template_kwargs: dict[str, Any]
    params: SamplingParams
    """Sampling parameters, with the model's own in place of those left out."""


class Answers:
    """Answers for requests, in the order in which an engine takes them.

    One text or call answers every request. Each request takes the next of a sequence or an
    iterator. A function is called with the messages, or the text of a prompt that is no chat.
    Raises `ConfigError` for anything else.
    """

    def __init__(self, given: GivenAnswers) -> None:
        if (
            inspect.iscoroutinefunction(given)
            or isinstance(given, bytes | bytearray)
            or not isinstance(given, str | Mapping | Sequence | Iterator | Callable)
        ):
            raise ConfigError(
                "answers must be a text, a call, a sequence or an iterator of answers, or a "
                f"function of the messages that isn't async, got {shown(given)}",
                argument="answers",
                value=given,
            )
        self._given = given
        self._num_taken = 0
        if isinstance(given, str | Mapping):
            _check("answers", given)
        elif isinstance(given, Sequence):
            for index, answer in enumerate(given):
                _check(f"answers[{index}]", answer)

    def take(self, request: FakeRequest, tool_parser: str | None) -> list[str]:
        """Return the answer of a request in each way in which a model may write it.

        One of these fits the form that the request asks for. `tool_parser` names the reader of
        calls; None: there is none. Raises `NoAnswerError`.
        """
        answer = self._next(request)
        if (problem := _problem(answer)) is not None:
            raise NoAnswerError(f"FakeModel: an answer must be {problem}")
        names = [tool["function"]["name"] for tool in request.tools]
        for part in _parts(answer):
            if isinstance(part, Mapping) and part["name"] not in names:
                offers = ", ".join(names) or "none"
                raise NoAnswerError(
                    f"FakeModel: the answer calls {part['name']!r:.100}, and the tools of the "
                    f"request are: {offers}"
                )
        if tool_parser is None and request.params.structured_output is not None:
            return [_alone(answer, request)]
        if tool_parser == "json":
            return _json(answer)
        return [_written(answer)]

    def _next(self, request: FakeRequest) -> Any:
        given, self._num_taken = self._given, self._num_taken + 1
        if isinstance(given, str | Mapping):
            return given
        if isinstance(given, Sequence):
            if self._num_taken > len(given):
                raise NoAnswerError(
                    f"FakeModel: answers has {len(given)}, and this is request {self._num_taken}; "
                    "a function answers any number, and so does one text"
                )
            return given[self._num_taken - 1]
        if isinstance(given, Iterator):
            return self._called("answers", next, given)
        heard = request.prompt if request.messages is None else copy.deepcopy(request.messages)
        return self._called("the function of answers", given, heard)

    def _called(self, what: str, call: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return call(argument)
        except StopIteration:
            raise NoAnswerError(
                f"FakeModel: {what} came to its end before request {self._num_taken}"
            ) from None
        except Exception as error:
            raise failed(what, error) from error


def failed(what: str, error: BaseException) -> NoAnswerError:
    """Return the error of a request for which a function of the test failed. The failure is
    logged.
    """
    logger.error("%s of a FakeModel failed", what, exc_info=error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"line {last.lineno} of {os.path.basename(last.filename)}"
    return NoAnswerError(f"FakeModel: {what} failed in {place}: {shown(error)}")


def _check(name: str, answer: Any) -> None:
    if (problem := _problem(answer)) is not None:
        raise ConfigError(f"{name} must be {problem}", argument="answers", value=answer)


def _problem(answer: Any) -> str | None:
    """Return what a bad answer must be instead; None for a good one."""
    if inspect.iscoroutine(answer):
        answer.close()
    if not isinstance(answer, str | Mapping | Sequence) or isinstance(answer, bytes | bytearray):
        return f"a text, a call or a list of these, got {shown(answer)}"
    for part in _parts(answer):
        if isinstance(part, Mapping):
            if part.keys() != CALL_KEYS:
                return (
                    "a call of a name and arguments, or JSON as text (json.dumps), got "
                    f"{shown(dict(part))}"
                )
            if not isinstance(part["name"], str) or not isinstance(
                part["arguments"], str | Mapping
            ):
                return (
                    'a call with a text as its name and an object, or its JSON, as "arguments", '
                    f"got {shown(dict(part))}"
                )
        elif not isinstance(part, str):
            return f"a text, a call or a list of these, got {shown(part)} in a list"
    try:
        _written(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return f"what UTF-8 and JSON can write: {shown(error)}"
    return None


def _parts(answer: Answer) -> Sequence[str | Mapping[str, Any]]:
    return [answer] if isinstance(answer, str | Mapping) else answer


def _written(answer: Answer) -> str:
    return "\n".join([one if isinstance(one, str) else _call(one) for one in _parts(answer)])


def _call(call: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{_object(call)}\n</tool_call>"


def _object(call: Mapping[str, Any]) -> str:
    name = json.dumps(call["name"], ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {_arguments(call)}}}'


def _arguments(call: Mapping[str, Any]) -> str:
    arguments = call["arguments"]
    if isinstance(arguments, str):
        return arguments
    return json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False)


def _alone(answer: Answer, request: FakeRequest) -> str:
    """Return only the arguments of a call, for a request that names the function to call."""
    parts = _parts(answer)
    calls = [part for part in parts if isinstance(part, Mapping)]
    if not calls:
        return _written(answer)
    if len(parts) > 1:
        raise NoAnswerError(
            f"FakeModel: the answer has {len(parts)} parts, and the request asks for the arguments "
            "of one call alone"
        )
    named = _named_tools(request)
    if named and calls[0]["name"] not in named:
        raise NoAnswerError(
            f"FakeModel: the answer calls {calls[0]['name']!r:.100}, and the request asks for a "
            f"call of {' or '.join(named)}"
        )
    return _arguments(calls[0])


def _named_tools(request: FakeRequest) -> list[str]:
    """Return the tools whose arguments are the form that the answer must have.

    A request over HTTP may name its function only like this.
    """
    wanted = request.params.structured_output
    if wanted is None or wanted.json_schema is None:
        return []
    form, names = json.loads(str(wanted.json_schema)), list[str]()
    for function in [tool["function"] for tool in request.tools]:
        parameters = function.get("parameters")
        nothing = {"properties": {}, "additionalProperties": False}
        if form == {"type": "object", **(nothing if parameters is None else parameters)}:
            names.append(function["name"])
    return names


def _json(answer: Answer) -> list[str]:
    """Return a list of calls, or also a single call, without marks, for a request that requires
    calls.
    """
    parts = _parts(answer)
    calls = [_object(part) for part in parts if isinstance(part, Mapping)]
    if not calls:
        return [_written(answer)]
    if len(calls) < len(parts):
        raise NoAnswerError("FakeModel: the answer has text, and the request asks for calls alone")
    return [f"[{', '.join(calls)}]", *calls[: len(calls) == 1]]
