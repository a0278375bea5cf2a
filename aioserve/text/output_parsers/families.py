"""Parsers of tool calls as each family of models writes them."""

from __future__ import annotations

from typing import ClassVar

from aioserve.text.output_parsers.marked_json import MarkedJsonParser
from aioserve.text.output_parsers.parts import short_id
from aioserve.text.output_parsers.reading import Reading
from aioserve.text.output_parsers.tool_parser import CallEnd, ToolParser

__all__ = [
    "DeepSeekV3Parser",
    "DeepSeekV31Parser",
    "HermesParser",
    "JsonCallsParser",
    "Llama3JsonParser",
    "MistralParser",
]

HERMES_OPENS, HERMES_CLOSES = "<tool_call>", "</tool_call>"
LLAMA3_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_DEEPSEEK_MARK = "<\uff5ctool▁{}\uff5c>".format
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = map(_DEEPSEEK_MARK, ("calls▁begin", "calls▁end"))
DEEPSEEK_CALL, DEEPSEEK_CALL_END = map(_DEEPSEEK_MARK, ("call▁begin", "call▁end"))
DEEPSEEK_SEP, DEEPSEEK_FENCE = _DEEPSEEK_MARK("sep"), "```"


class HermesParser(MarkedJsonParser):
    """Reads tool calls as Hermes and Qwen write them:

        <tool_call>
        {"name": "get_weather", "arguments": {"city": "Oslo"}}
        </tool_call>

    one after the other. The closing tag may be missing at the end, or before the next call. Text
    between a call and its closing tag is content.
    """

    name = "hermes"
    mark_before = HERMES_OPENS
    mark_behind = HERMES_CLOSES
    marks: ClassVar[tuple[str, ...]] = (HERMES_OPENS, HERMES_CLOSES)
    opens: ClassVar[tuple[str, ...]] = (HERMES_OPENS,)
    takes_typed_marks: ClassVar[bool] = True

    @classmethod
    def reads(cls, source: str) -> bool:
        # Others have the same tag around text that isn't JSON (Qwen3-Coder, GLM).
        others = "<function=", "<arg_key>"
        return HERMES_OPENS in source and not any(mark in source for mark in others)


class Llama3JsonParser(ToolParser):
    """Reads tool calls as Llama 3 writes them: the completion is the call,

        {"name": "get_weather", "parameters": {"city": "Oslo"}}

    possibly after the token <|python_tag|>. With that token, a call may also follow content.
    Several calls have a semicolon, a comma or white space between them.
    """

    name = "llama3_json"
    marks: ClassVar[tuple[str, ...]] = (LLAMA3_TAG,)

    @classmethod
    def reads(cls, source: str) -> bool:
        by_words = "<|start_header_id|>" in source and '"parameters"' in source
        return LLAMA3_TAG in source or by_words

    def _read(self) -> Reading[None]:
        held = yield from self._spaces()
        if (yield from self._next()) == "{":
            held = yield from self._calls(held)
        while raw := (yield from self._give_up_to(LLAMA3_TAG, held=held)):
            raw += yield from self._spaces()
            if (yield from self._next()) == "{":
                held = yield from self._calls(raw)
            else:
                self._give(raw)
                held = ""

    def _calls(self, raw: str) -> Reading[str]:
        """Read consecutive calls; return the white space after the last."""
        while True:
            end = yield from self._call(raw)
            if end is CallEnd.BROKEN:
                yield from self._broken_arguments()
            if end is not CallEnd.WHOLE:
                return ""
            raw = yield from self._spaces()
            if separator := (yield from self._one_of(";", ",")):
                raw += separator + (yield from self._spaces())
            if (yield from self._next()) != "{":
                if not separator:
                    return raw
                self._give(raw)
                return ""


class MistralParser(ToolParser):
    """Reads tool calls as Mistral's models write them: a list of objects, or name by name,

        [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
        [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]...

    An id may stand before the arguments: [CALL_ID]VvvODy9mT[ARGS]. Text after the list, or after
    the arguments, is content.
    """

    name = "mistral"
    marks: ClassVar[tuple[str, ...]] = (MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGS)
    opens: ClassVar[tuple[str, ...]] = (MISTRAL_CALLS,)
    _ids = staticmethod(short_id)

    @classmethod
    def reads(cls, source: str) -> bool:
        return MISTRAL_CALLS in source

    def _read(self) -> Reading[None]:
        held = raw = ""
        while raw := raw or (yield from self._give_up_to(MISTRAL_CALLS, held=held)):
            held = ""
            raw += yield from self._spaces()
            following = yield from self._next()
            if following == "[":
                self._at += 1
                end, held = yield from self._list(f"{raw}[")
            elif following == "{":
                end = yield from self._call(raw)
            else:
                end = yield from self._named(raw)
            raw = ""
            if end is CallEnd.BROKEN:
                raw = yield from self._broken_arguments(MISTRAL_CALLS)

    def _named(self, raw: str) -> Reading[CallEnd]:
        name, call_id = (yield from self._word()), ""
        raw += name
        if name and (mark := (yield from self._one_of(MISTRAL_CALL_ID))):
            call_id = yield from self._word()
            raw += mark + call_id
        raw += yield from self._one_of(MISTRAL_ARGS)
        raw += yield from self._spaces()
        if not name or (yield from self._next()) != "{":
            self._give(raw)
            return CallEnd.NO_CALL
        self._begin_call(name, call_id)
        return (yield from self._arguments())


class DeepSeekV31Parser(ToolParser):
    """Reads tool calls as DeepSeek V3.1 writes them, with full-width bars and without line breaks:

        <|tool▁calls▁begin|>
        <|tool▁call▁begin|>get_weather<|tool▁sep|>{"city": "Oslo"}<|tool▁call▁end|>
        <|tool▁calls▁end|>

    with any number of calls. The outer marks may be missing, and so may the end mark of a call.
    Text between a call and its end mark is content.
    """

    name = "deepseek_v31"
    marks: ClassVar[tuple[str, ...]] = (
        DEEPSEEK_CALL,
        DEEPSEEK_CALLS,
        DEEPSEEK_SEP,
        DEEPSEEK_CALL_END,
        DEEPSEEK_CALLS_END,
    )
    opens: ClassVar[tuple[str, ...]] = (DEEPSEEK_CALL, DEEPSEEK_CALLS)

    @classmethod
    def reads(cls, source: str) -> bool:
        return DEEPSEEK_CALL in source and not DeepSeekV3Parser.reads(source)

    def _read(self) -> Reading[None]:
        begins, ends = (DEEPSEEK_CALL, DEEPSEEK_CALLS), (DEEPSEEK_CALL_END, DEEPSEEK_CALLS_END)
        held, marks = "", begins
        while raw := (yield from self._give_up_to(*marks, held=held)):
            held = ""
            if raw.endswith(ends):
                self._end_call()
                marks = begins if raw.endswith(DEEPSEEK_CALLS_END) else marks
                continue
            marks = begins
            if raw.endswith(DEEPSEEK_CALLS):
                raw += yield from self._spaces()
                raw += (mark := (yield from self._one_of(DEEPSEEK_CALL)))
                if not mark:
                    self._give(raw)
                    continue
            end = yield from self._named(raw)
            if end is CallEnd.BROKEN:
                mark = yield from self._broken_arguments(*ends)
                marks = begins if mark == DEEPSEEK_CALLS_END else (*begins, *ends)
            elif end is CallEnd.WHOLE:
                held = yield from self._behind()
                marks = (*begins, *ends)

    def _named(self, raw: str) -> Reading[CallEnd]:
        """Read a call after its mark; `raw` is the text that led to it."""
        name, before = yield from self._head()
        raw += before
        if not name or (yield from self._next()) != "{":
            self._give(raw)
            return CallEnd.NO_CALL
        self._begin_call(name)
        return (yield from self._arguments())

    def _head(self) -> Reading[tuple[str, str]]:
        """Read up to the arguments; return the name, empty without one, and all that was read."""
        name = yield from self._word()
        mark = yield from self._one_of(DEEPSEEK_SEP)
        spaces = yield from self._spaces()
        return name if mark else "", name + mark + spaces

    def _behind(self) -> Reading[str]:
        """Read the white space after the arguments; return it."""
        return (yield from self._spaces())


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Reads tool calls as DeepSeek V3 and R1 write them: as V3.1 does, with a different call:

        <|tool▁call▁begin|>function<|tool▁sep|>get_weather
        ```json
        {"city": "Oslo"}
        ```<|tool▁call▁end|>

    The fence may be missing.
    """

    name = "deepseek_v3"

    @classmethod
    def reads(cls, source: str) -> bool:
        return DEEPSEEK_CALL in source and f"{DEEPSEEK_FENCE}json" in source

    def _head(self) -> Reading[tuple[str, str]]:
        kind = yield from self._word()
        mark = yield from self._one_of(DEEPSEEK_SEP)
        name = (yield from self._word()) if mark else ""
        taken = kind + mark + name + (yield from self._spaces())
        if fence := (yield from self._one_of(DEEPSEEK_FENCE)):
            taken += fence + (yield from self._one_of("json"))
            taken += yield from self._spaces()
        return name, taken

    def _behind(self) -> Reading[str]:
        spaces = yield from self._spaces()
        if not (yield from self._one_of(DEEPSEEK_FENCE)):
            return spaces
        return (yield from self._spaces())


class JsonCallsParser(ToolParser):
    """Reads tool calls as plain JSON: a completion that is a list of calls, or one call,

        [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
        {"name": "get_weather", "arguments": {"city": "Oslo"}}

    without any mark. No family of models writes this by itself: a schema of calls asks for it. Text
    after the list, or the call, is content. Every template takes the ids.
    """

    name = "json"
    marks: ClassVar[tuple[str, ...]] = ()
    takes_lists: ClassVar[bool] = True
    _ids = staticmethod(short_id)

    def _read(self) -> Reading[None]:
        raw = yield from self._spaces()
        is_list = bool((yield from self._one_of("[")))
        if is_list:
            raw += "[" + (yield from self._spaces())
        if (yield from self._next()) != "{":
            self._give(raw)
        else:
            while (yield from self._calls_on(raw, is_list=is_list)):
                raw = "," + (yield from self._spaces())
        held = yield from self._give_up_to()
        self._give(held)

    def _calls_on(self, raw: str, *, is_list: bool) -> Reading[bool]:
        """Read a call and what follows it; return true if another call follows."""
        end = yield from self._call(raw)
        if end is CallEnd.BROKEN:
            yield from self._broken_arguments()
        if end is not CallEnd.WHOLE or not is_list:
            return False
        spaces = yield from self._spaces()
        separator = yield from self._one_of(",", "]")
        if not separator:
            self._give(spaces)
        return separator == ","
