"""Checks that formats of tool calls and of reasoning keep their contracts, on random input."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aioserve.errors import InvalidRequestError
from aioserve.isolation import PluginFault
from aioserve.testing.examples import check_arguments, quiet_settings
from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.declared import (
    CallFormat,
    CustomCalls,
    JsonCalls,
    ReasoningMarks,
    check_call_format,
    check_tags,
    parser_of,
    tags_of,
)
from aioserve.text.output_parsers.parts import Parts, ToolCall, joined, whole_calls
from aioserve.text.output_parsers.reasoning import ReasoningReader
from aioserve.text.output_parsers.tool_parser import ToolParser

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["check_reasoning_parser", "check_tool_parser", "read_calls"]

TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
)
MAX_PIECES = 12
MAX_CUTS = 6
Read = tuple[str, list[tuple[str, str]]]
"""Content, and the name and the arguments of each call."""


def read_calls(
    written: CallFormat, text: str, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, tuple[ToolCall, ...]]:
    """Read a whole completion: its content, and its tool calls. Calls without an id of their own
    have "call_0", "call_1" and so on. `tools` are those of the request, as a chat template has
    them.

    Raises `InvalidRequestError` for a format that can't be used, and `AssertionError` where a
    reader of `CustomCalls` raises or answers what it mustn't.
    """
    try:
        check_call_format(written)
    except ValueError as error:
        raise InvalidRequestError(f"the format {error}", argument="written") from error
    parts = _parts(written, [text], tools)
    return parts.content, whole_calls(parts.tool_calls)


def check_tool_parser(written: CallFormat, *, max_examples: int = 100) -> None:
    """Raise `AssertionError`, with a small example, unless a format of tool calls

    - has fields that can be used;
    - raises nothing, and answers content and parts of calls, whatever the text;
    - reads the same whatever the pieces in which a text comes;
    - leaves text without its marks as it is, where it has marks;
    - reads a call in each of its `examples`, where it has some;
    - reads calls that are written as `JsonCalls` says, where it is one.

    Needs hypothesis. Raises `ConfigError` for a number of examples that is none.
    """
    check_arguments("check_tool_parser", check_tool_parser, max_examples)
    try:
        check_call_format(written)
    except ValueError as error:
        raise AssertionError(f"the format {error}") from error
    marks = _parser(written).marks
    known = written.examples if isinstance(written, CustomCalls) else ()
    for text in known:
        if not _read(written, [text])[1]:
            raise AssertionError(f"{text!r}, which is among the examples, has no call")
    from hypothesis import given

    @quiet_settings(max_examples, report_multiple_bugs=False)
    @given(_texts(marks, known), _cuts())
    def check(text: str, cuts: list[int]) -> None:
        whole = _read(written, [text])
        for pieces in (_cut(text, cuts), list(text)):
            if (found := _read(written, pieces)) != whole:
                raise AssertionError(
                    f"{pieces!r} is read as {found!r}, and as {whole!r} in one piece"
                )
        if marks and not any(mark in text for mark in marks) and whole != (text, []):
            raise AssertionError(f"{text!r} has no mark, and is read as {whole!r}")

    check()
    if isinstance(written, JsonCalls):
        _check_json_calls(written)


def check_reasoning_parser(written: ReasoningMarks, *, max_examples: int = 100) -> None:
    """Raise `AssertionError`, with a small example, unless tags of reasoning can be used, and tell
    reasoning from content in whatever pieces a text comes. Needs hypothesis. Raises `ConfigError`
    for a number of examples that is none."""
    check_arguments("check_reasoning_parser", check_reasoning_parser, max_examples)
    try:
        check_tags(written)
    except ValueError as error:
        raise AssertionError(f"the format {error}") from error
    tags = tags_of(written)
    from hypothesis import given

    @quiet_settings(max_examples, report_multiple_bugs=False)
    @given(_texts(tags.marks), _cuts())
    def check(text: str, cuts: list[int]) -> None:
        for opened in {"", tags.opens} - ({""} if tags.is_open else set()):
            whole = _joined(tags.reader(opened), [text])
            for pieces in (_cut(text, cuts), list(text)):
                found = _joined(tags.reader(opened), pieces)
                if found != whole:
                    raise AssertionError(
                        f"{pieces!r} is read as {found!r}, and as {whole!r} in one piece"
                    )

    check()
    opens = "" if tags.is_open else tags.opens
    told = _joined(tags.reader(tags.opens if tags.is_open else ""), [f"{opens}so{tags.closes}yes"])
    if (told.reasoning, told.content) != ("so", "yes"):
        raise AssertionError(f"{opens}so{tags.closes}yes is read as {told!r}")


def _check_json_calls(written: JsonCalls) -> None:
    call = json.dumps({"name": "get_weather", written.arguments: {"city": "Oslo"}})
    for count in (1, 2):
        calls = [call] * count
        inner = [f"[{', '.join(calls)}]"] if written.in_list else calls
        text = "".join([f"{written.opens}{one}{written.closes}" for one in inner])
        expected = ("", [("get_weather", '{"city": "Oslo"}')] * count)
        if (found := _read(written, [text])) != expected:
            raise AssertionError(f"{text!r} is read as {found!r}, not as {count} calls")


def _parser(written: CallFormat) -> type[ToolParser]:
    return parser_of("checked", written, "checked")


def _parts(written: CallFormat, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> Parts:
    numbers = itertools.count()
    try:
        parser = _parser(written)(lambda: f"call_{next(numbers)}", ArgumentTypes(tools))
        return _joined(parser, pieces)
    except PluginFault as error:
        raise AssertionError(f"of {list(pieces)!r}: {error}") from error


def _joined(reader: ToolParser | ReasoningReader, pieces: Sequence[str]) -> Parts:
    return joined([*[reader.push(piece) for piece in pieces], reader.finish()])


def _read(written: CallFormat, pieces: Sequence[str]) -> Read:
    parts = _parts(written, pieces, TOOLS)
    return parts.content, [(call.name, call.arguments) for call in whole_calls(parts.tool_calls)]


def _texts(marks: Sequence[str], known: Sequence[str] = ()) -> SearchStrategy[str]:
    from hypothesis import strategies as st

    call = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
    common = [call, call.replace("arguments", "parameters"), f"[{call}, {call}]", call[:-9]]
    common += ["get_weather", "(city='Oslo', days=2)", "city", "{", "}", "[", "]", "\n", " ", ", "]
    halves = [mark[: (len(mark) + 1) // 2] for mark in marks]
    piece = st.sampled_from([*marks, *marks, *common, *halves]) | st.text(max_size=4)
    if known:
        piece |= st.sampled_from(known) | st.builds(
            _cut_short, st.sampled_from(known), st.floats(0, 1)
        )
    return st.lists(piece, max_size=MAX_PIECES).map("".join)


def _cut_short(text: str, part: float) -> str:
    return text[: int(len(text) * part)]


def _cuts() -> SearchStrategy[list[int]]:
    from hypothesis import strategies as st

    return st.lists(st.integers(0, 200), max_size=MAX_CUTS)


def _cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *[cut % (len(text) + 1) for cut in cuts]})
    return [text[first:end] for first, end in itertools.pairwise(places)] or [text]
