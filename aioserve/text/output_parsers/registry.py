"""Parsers of tool calls and formats of reasoning, by name and by chat template.

Bundled parsers and those of plugins take the same path.

Names are those of vLLM's parsers, except harmony, which has two names there.
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
from aioserve.text.output_parsers.harmony import HarmonyChannels, HarmonyParser
from aioserve.text.output_parsers.reasoning import ReasoningTags
from aioserve.text.output_parsers.tagged import Glm45Parser, Qwen3CoderParser
from aioserve.text.output_parsers.tool_parser import ToolParser

__all__ = [
    "BUNDLED",
    "REASONING_FORMATS",
    "REASONING_TAGS",
    "TOOL_PARSERS",
    "OutputParsers",
    "ReasoningFormat",
    "reasoning_format_named",
    "tells_tool_parser",
    "tool_parser_named",
]

_NAMED = re.compile(r"\{#[-+]?\s*tool_parser:\s*([\w.-]*\w)\s*[-+]?#\}")
"""Pattern of a comment in which a template names its parser."""


TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    parser.name: parser
    for parser in (
        HermesParser,
        Llama3JsonParser,
        MistralParser,
        DeepSeekV3Parser,
        DeepSeekV31Parser,
        HarmonyParser,
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
ReasoningFormat = ReasoningTags | HarmonyChannels
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {**REASONING_TAGS, "harmony": HarmonyChannels()}


class OutputParsers(msgspec.Struct, frozen=True):
    """The parsers that one engine knows, by name; "auto" asks them in their order."""

    tools: Mapping[str, type[ToolParser]]
    reasoning: Mapping[str, ReasoningFormat]


BUNDLED = OutputParsers(TOOL_PARSERS, REASONING_FORMATS)


def tool_parser_named(
    name: object, source: str, *, has_tools: bool, parsers: OutputParsers = BUNDLED
) -> type[ToolParser] | None:
    """Return the parser of that name; for "auto" the template's, if there are tools.

    Raises `InvalidRequestError` for an unknown name, and for a template with tools whose parser is
    unknown.
    """
    name = _checked("tool_parser", name, parsers.tools)
    if name == "auto":
        if not has_tools:
            return None
        if (parser := _parser_in(source, parsers)) is not None:
            return parser
        raise InvalidRequestError(
            "tool_parser must be named, one of "
            f"{', '.join(parsers.tools)}, as nothing in the chat template tells how the model "
            "calls tools; with 'none' calls are text",
            argument="tool_parser",
            value="auto",
        )
    return parsers.tools.get(name)


def tells_tool_parser(source: str, parsers: OutputParsers = BUNDLED) -> bool:
    """True if a template tells how its model calls tools."""
    return _parser_in(source, parsers) is not None


def _parser_in(source: str, parsers: OutputParsers) -> type[ToolParser] | None:
    named = _NAMED.search(source)
    if named is not None and named[1] in parsers.tools:
        return parsers.tools[named[1]]
    return next((one for one in parsers.tools.values() if one.reads(source)), None)


def reasoning_format_named(
    name: object, source: str, parsers: OutputParsers = BUNDLED
) -> ReasoningFormat | None:
    """Return the format of that name; for "auto" the template's, None if it has none.

    A template with tags can't tell that a completion begins with reasoning. Raises
    `InvalidRequestError` for an unknown name.
    """
    name = _checked("reasoning_parser", name, parsers.reasoning)
    if name == "auto" and HarmonyParser.reads(source):
        return REASONING_FORMATS["harmony"]
    if name == "auto":
        # A template that opens the tag in the prompt need not have the closing one.
        tags = (one for one in parsers.reasoning.values() if isinstance(one, ReasoningTags))
        named = (one for one in tags if any(t in source for t in one.marks))
        return next((one for one in named if not one.is_open), None)
    return parsers.reasoning.get(name)


def _checked(argument: str, name: object, known: Mapping[str, object]) -> str:
    return check(InvalidRequestError, argument, name, choice("auto", "none", *known))
