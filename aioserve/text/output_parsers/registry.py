"""Parsers of tool calls and tags of reasoning, by name and by chat template.

Names are those that vLLM has for its parsers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from aioserve.arguments import check, choice
from aioserve.errors import InvalidRequestError
from aioserve.text.output_parsers.families import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    HermesParser,
    JsonCallsParser,
    Llama3JsonParser,
    MistralParser,
)
from aioserve.text.output_parsers.tagged import Glm45Parser, Qwen3CoderParser
from aioserve.text.output_parsers.tool_parser import ToolParser

__all__ = [
    "REASONING_TAGS",
    "TOOL_PARSERS",
    "ReasoningTags",
    "reasoning_tags_named",
    "tells_tool_parser",
    "tool_parser_named",
]

MAX_BEGUN_CHARS = 2**20
"""Most characters searched, so that a long message doesn't hold the event loop."""

_NAMED = re.compile(r"\{#[-+]?\s*tool_parser:\s*(\w+)\s*[-+]?#\}")
"""A comment in which a template names the parser that it is written for."""


class ReasoningTags(msgspec.Struct, frozen=True):
    """The tags around reasoning."""

    opens: str
    closes: str
    is_open: bool
    """Whether a completion begins with reasoning, whatever the prompt ends with."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opens, self.closes)

    def is_open_after(self, prompt_end: str, begun: str) -> bool:
        """Whether a completion goes on with reasoning. `prompt_end` is the end of the prompt, which
        may have opened the tag. `begun` is the message that the completion continues, which is read
        as its start: reasoning that it begins with is open while no tag closes it. The tags are
        looked for in the first and the last `MAX_BEGUN_CHARS` of it."""
        is_open = self.is_open or begun[:MAX_BEGUN_CHARS].lstrip().startswith(self.opens)
        if is_open and self.closes not in begun[-MAX_BEGUN_CHARS:]:
            return True
        return prompt_end.rstrip().endswith(self.opens)


TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    parser.name: parser
    for parser in (
        HermesParser,
        Llama3JsonParser,
        MistralParser,
        DeepSeekV3Parser,
        DeepSeekV31Parser,
        Glm45Parser,
        Qwen3CoderParser,
        JsonCallsParser,
    )
}
REASONING_TAGS: Mapping[str, ReasoningTags] = {
    "qwen3": ReasoningTags("<think>", "</think>", is_open=False),
    "deepseek_r1": ReasoningTags("<think>", "</think>", is_open=True),
    "mistral": ReasoningTags("[THINK]", "[/THINK]", is_open=False),
}


def tool_parser_named(name: object, source: str, *, has_tools: bool) -> type[ToolParser] | None:
    """Parser of that name; for "auto" the template's, if there are tools. Raises
    `InvalidRequestError` for an unknown name, and where none is known for a template with tools."""
    name = _checked("tool_parser", name, TOOL_PARSERS)
    if name == "auto":
        if not has_tools:
            return None
        if (parser := _parser_in(source)) is not None:
            return parser
        raise InvalidRequestError(
            "tool_parser must be named, one of "
            f"{', '.join(TOOL_PARSERS)}, as nothing in the chat template tells how the model "
            "calls tools; with 'none' calls are text",
            argument="tool_parser",
            value="auto",
        )
    return TOOL_PARSERS.get(name)


def tells_tool_parser(source: str) -> bool:
    """Whether a template tells how its model calls tools."""
    return _parser_in(source) is not None


def _parser_in(source: str) -> type[ToolParser] | None:
    named = _NAMED.search(source)
    if named is not None and named[1] in TOOL_PARSERS:
        return TOOL_PARSERS[named[1]]
    return next((one for one in TOOL_PARSERS.values() if one.reads(source)), None)


def reasoning_tags_named(name: object, source: str) -> ReasoningTags | None:
    """Tags of that name; for "auto" the template's, None if it has none. That a completion begins
    with reasoning no template tells. Raises
    `InvalidRequestError` for an unknown name."""
    name = _checked("reasoning_parser", name, REASONING_TAGS)
    if name == "auto":
        written = (one for one in REASONING_TAGS.values() if one.closes in source)
        return next((one for one in written if not one.is_open), None)
    return REASONING_TAGS.get(name)


def _checked(argument: str, name: object, known: Mapping[str, object]) -> str:
    return check(InvalidRequestError, argument, name, choice("auto", "none", *known))
