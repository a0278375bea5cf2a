"""Formats of tool calls as frozen values, which plugins declare, and the parsers made of them.

The code for bundled formats reads `JsonCalls` and holds it to schemas. Code of the plugin reads
`CustomCalls`, and is called in a guarded way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from aioserve.isolation import NotAnAnswer, PluginCalls, shown
from aioserve.text.output_parsers.argument_types import ArgumentTypes
from aioserve.text.output_parsers.marked_json import MarkedJsonParser
from aioserve.text.output_parsers.parts import Parts, ToolCallDelta
from aioserve.text.output_parsers.reasoning import ReasoningTags
from aioserve.text.output_parsers.tool_parser import ToolParser

__all__ = [
    "CallFormat",
    "CustomCalls",
    "CustomParser",
    "JsonCalls",
    "ReasoningMarks",
    "ToolCallReader",
    "check_call_format",
    "check_tags",
    "parser_of",
    "tags_of",
]

logger: logging.Logger = logging.getLogger(__name__)

MAX_MARK_CHARS = 256
MAX_MARKS = 32
"""Most marks, texts of templates, and examples of a format."""
MAX_EXAMPLE_CHARS = 2048


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Format in which a family of models writes tool calls: base of `JsonCalls` and `CustomCalls`.

    `template_has` and `template_lacks` say which chat templates are written for it. They count
    where a caller names no parser and no bundled parser reads the template. The first format, by
    name, whose texts the template has and lacks is taken.
    """

    template_has: tuple[str, ...] = ()
    """Texts that a chat template for this format has. Empty: it is used by name alone."""
    template_lacks: tuple[str, ...] = ()
    """Texts that a chat template for this format doesn't have."""

    def reads(self, template: str) -> bool:
        """Return true if a chat template of this source is written for the format."""
        has, lacks = self.template_has, self.template_lacks
        return (
            bool(has) and all(t in template for t in has) and not any(t in template for t in lacks)
        )


class JsonCalls(CallFormat, frozen=True, kw_only=True):
    """Tool calls that are JSON behind a mark, each an object with the name of a function and its
    arguments:

        <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>

    Text without a mark is content. A grammar can hold the calls to the schemas of tools.
    """

    opens: str
    """The mark before each call: 1 to 256 characters."""
    closes: str = ""
    """The mark behind each call; empty where the model writes none. The model may forget it."""
    arguments: Literal["arguments", "parameters"] = "arguments"
    """The key of arguments in calls that a grammar holds; both keys are read."""
    in_list: bool = False
    """True if a list of calls stands behind the mark, as in `<calls>[{...}, {...}]`."""
    typed_marks: bool = False
    """True if a mark counts where the model spells it in ordinary tokens, although the tokenizer
    has a special token of that text. False: the special token alone is the mark."""


class ReasoningMarks(msgspec.Struct, frozen=True):
    """Tags around the reasoning of an answer."""

    opens: str
    closes: str
    is_open: bool = False
    """True if an answer begins with reasoning, whatever the prompt ends with."""


class ToolCallReader(Protocol):
    """Reader of one completion for `CustomCalls`. Its results, joined, are the same for any pieces
    of the text."""

    def push(self, text: str) -> Iterable[str | ToolCallDelta]:
        """Take more text; return what became known: content, and parts of tool calls."""
        ...

    def finish(self) -> Iterable[str | ToolCallDelta]:
        """End the text; return what was held back."""
        ...


class CustomCalls(CallFormat, frozen=True, kw_only=True):
    """Tool calls that code of the plugin reads.

    No grammar knows the format: a request with `strict_tools`, `required_tools` or a form beside
    tools is refused.
    """

    reader: Callable[[Sequence[Mapping[str, Any]]], ToolCallReader]
    """Makes a reader of one completion, given the request's tools as a chat template has them."""
    marks: tuple[str, ...] = ()
    """Marks of the format. Special tokens among them are part of the text that a reader gets."""
    typed_marks: bool = False
    """True if a mark counts where the model spells it in ordinary tokens."""
    examples: tuple[str, ...] = ()
    """Completions with calls, of up to 2048 characters. Checks of the plugin try parts of them:
    nothing else tells these what calls look like."""


class CustomParser(ToolParser):
    """Parser that asks a reader of a plugin. Raises `PluginFault` for its mistakes."""

    has_grammar: ClassVar[bool] = False
    label: ClassVar[str] = ""
    make: ClassVar[Callable[[Sequence[Mapping[str, Any]]], ToolCallReader]]

    def __init__(
        self, new_id: Callable[[], str] | None = None, types: ArgumentTypes | None = None
    ) -> None:
        self._new_id = new_id or self._ids
        self._calls = PluginCalls(self.label, "the request ends", logger)
        self._begun: list[str] = []
        """Ids of the calls so far."""
        tools = () if types is None else types.tools
        self._reader = self._calls.call("reader(tools)", lambda: type(self).make(tools))

    def push(self, text: str) -> Parts:
        return self._calls.call("push(text)", lambda: self._parts(self._reader.push(text)))

    def finish(self) -> Parts:
        return self._calls.call("finish()", lambda: self._parts(self._reader.finish()))

    def _parts(self, answer: object) -> Parts:
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            raise NotAnAnswer(answer, "which is no list of str and ToolCallDelta")
        content: list[str] = []
        deltas: list[ToolCallDelta] = []
        for part in answer:
            if isinstance(part, str):
                content.append(str.__str__(part))
            elif isinstance(part, ToolCallDelta):
                deltas.append(self._checked(part))
            else:
                raise NotAnAnswer(part, "which is neither a str nor a ToolCallDelta")
        return Parts("".join(content), "", tuple(deltas))

    def _checked(self, delta: ToolCallDelta) -> ToolCallDelta:
        """The delta, with an id of ours where the first one of a call has none."""
        index, begun = delta.index, self._begun
        if type(index) is not int or not isinstance(delta.arguments, str):
            raise NotAnAnswer(delta, "whose index is no int, or whose arguments are no str")
        if index == len(begun):
            if not isinstance(delta.name, str) or not delta.name:
                raise NotAnAnswer(delta, "which begins a call and has no name")
            call_id = self._new_id() if delta.id is None else delta.id
            if not isinstance(call_id, str) or not call_id or call_id in begun:
                raise NotAnAnswer(delta, "whose id is no str, or is that of another call")
            begun.append(call_id)
            return ToolCallDelta(index, call_id, delta.name, delta.arguments)
        if index != len(begun) - 1 or delta.name is not None or delta.id is not None:
            raise NotAnAnswer(delta, "which neither begins the next call nor goes on with the last")
        return ToolCallDelta(index, arguments=delta.arguments)


def parser_of(name: str, written: CallFormat, label: str) -> type[ToolParser]:
    """The parser of a format, by the name that requests choose it by. `label` names its plugin in
    logs and errors. The format has passed `check_call_format`."""
    own: dict[str, Any] = {
        "name": name,
        "__module__": __name__,
        "reads": classmethod(lambda cls, source: written.reads(source)),
    }
    if isinstance(written, JsonCalls):
        own |= {
            "mark_before": written.opens,
            "mark_behind": written.closes,
            "arguments_key": written.arguments,
            "in_list": written.in_list,
            "marks": tuple(filter(None, (written.opens, written.closes))),
            "opens": (written.opens,),
            "takes_typed_marks": written.typed_marks,
        }
        return type("DeclaredParser", (MarkedJsonParser,), own)
    if isinstance(written, CustomCalls):
        own |= {
            "label": f"tool parser {label}",
            "make": staticmethod(written.reader),
            "marks": written.marks,
            "takes_typed_marks": written.typed_marks,
        }
        return type("CustomParserOfPlugin", (CustomParser,), own)
    raise TypeError(f"no format of calls: {shown(written)}")


def check_call_format(written: object) -> None:
    """Raise `ValueError`, in words, for what is no format of tool calls that can be read."""
    if not isinstance(written, JsonCalls | CustomCalls):
        raise ValueError(f"must be a JsonCalls or a CustomCalls, got {shown(written)}")
    for field in ("template_has", "template_lacks"):
        _check_texts(field, getattr(written, field))
    _check_bool("typed_marks", written.typed_marks)
    if isinstance(written, CustomCalls):
        _check_texts("marks", written.marks)
        _check_texts("examples", written.examples, MAX_EXAMPLE_CHARS, stripped=False)
        if not callable(written.reader):
            raise ValueError(f"reader must be callable, got {shown(written.reader)}")
        return
    _check_text("opens", written.opens)
    if written.closes != "":
        _check_text("closes", written.closes)
        if written.closes in written.opens or written.opens in written.closes:
            raise ValueError(
                f"opens and closes must not hold each other, got {written.opens!r} and "
                f"{written.closes!r}"
            )
    _check_bool("in_list", written.in_list)
    if written.arguments not in ("arguments", "parameters"):
        raise ValueError(
            f"arguments must be 'arguments' or 'parameters', got {shown(written.arguments)}"
        )


def check_tags(tags: object) -> None:
    """Raise `ValueError`, in words, for what are no tags of reasoning."""
    if not isinstance(tags, ReasoningMarks):
        raise ValueError(f"must be ReasoningMarks, got {shown(tags)}")
    _check_text("opens", tags.opens)
    _check_text("closes", tags.closes)
    _check_bool("is_open", tags.is_open)
    if tags.opens in tags.closes or tags.closes in tags.opens:
        raise ValueError(
            f"opens and closes must not hold each other, got {tags.opens!r} and {tags.closes!r}"
        )


def tags_of(marks: ReasoningMarks) -> ReasoningTags:
    """The tags by which reasoning is read, of marks that have passed `check_tags`."""
    return ReasoningTags(marks.opens, marks.closes, marks.is_open)


def _check_texts(
    field: str, texts: object, most: int = MAX_MARK_CHARS, *, stripped: bool = True
) -> None:
    if not isinstance(texts, tuple) or len(texts) > MAX_MARKS:
        raise ValueError(f"{field} must be a tuple of at most {MAX_MARKS} strs, got {shown(texts)}")
    for one in texts:
        _check_text(f"each of {field}", one, most, stripped=stripped)


def _check_text(
    field: str, text: object, most: int = MAX_MARK_CHARS, *, stripped: bool = True
) -> None:
    plain = text if type(text) is str else ""
    if not 0 < len(plain) <= most or (stripped and plain != plain.strip()):
        ends = " without white space at its ends" if stripped else ""
        raise ValueError(
            f"{field} must be a str of 1 to {most} characters{ends}, got {shown(text)}"
        )


def _check_bool(field: str, value: object) -> None:
    if type(value) is not bool:
        raise ValueError(f"{field} must be True or False, got {shown(value)}")
