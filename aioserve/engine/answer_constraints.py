"""Constraints on the answers of `Engine.chat`: calls of tools, required or not, or else a form.

Must not know how a model writes calls, except if a mark begins them.
"""

from __future__ import annotations

import msgspec

from aioserve.arguments import boolean, check, integer, optional, plain_str, sequence, text
from aioserve.config import EngineConfig
from aioserve.errors import InvalidRequestError
from aioserve.structured_output import MAX_WHITESPACE, StructuredOutput
from aioserve.text.conversation import MAX_TOOLS
from aioserve.text.output_parsers.registry import OutputParsers
from aioserve.text.output_parsers.tool_parser import ToolParser

__all__ = [
    "AnswerConstraints",
    "answer_constraints",
    "check_marked",
    "form_beside_calls",
    "has_tools",
]

_OF_JSON = ("json_schema", "json_object")


class AnswerConstraints(msgspec.Struct, frozen=True):
    """Constraints on answers. Calls in them always name one of the tools."""

    strict: frozenset[str]
    """Names of tools whose calls must have arguments that fit their parameters."""
    one: bool
    """True if an answer has one call at most."""
    max_whitespace: int | None
    """Most characters of white space at each place of the JSON of answers, as in
    `StructuredOutput`."""
    form: StructuredOutput | None = None
    """Structured output of an answer without calls; None for text."""
    required: frozenset[str] = frozenset()
    """Names of tools. If there are any, an answer calls one or more of these, and says nothing
    else."""

    @property
    def names(self) -> dict[str, frozenset[str]]:
        """Names of tools, by the argument that gave them."""
        return {"strict_tools": self.strict, "required_tools": self.required}

    @property
    def is_whole(self) -> bool:
        """True if an answer with calls has nothing beside them."""
        return self.form is not None or bool(self.required)


def has_tools(tools: object) -> bool:
    return tools is not None and not (type(tools) in (list, tuple) and not tools)


def form_beside_calls(
    wanted: StructuredOutput | None,
    tools: object,
    tool_parser: object,
    config: EngineConfig,
    parsers: OutputParsers,
) -> StructuredOutput | None:
    """Return `wanted` if answers may also be calls of `tools`; otherwise None.

    That needs a JSON form, and calls that begin with marks, or are read as the engine's options or
    the chat template say.
    """
    if wanted is None or wanted.kind not in _OF_JSON or not has_tools(tools):
        return None
    name = plain_str(tool_parser) or ""
    if name == "auto":
        return wanted if config.tool_parser != "none" else None
    return wanted if name in parsers.tools and parsers.tools[name].opens else None


def check_marked(held: AnswerConstraints | None, parser: type[ToolParser]) -> None:
    """Raise `InvalidRequestError` where calls, as the parser reads them, have no mark, and there is
    to be nothing else; and where no grammar knows them."""
    if held is not None and not parser.has_grammar:
        argument = next((name for name, named in held.names.items() if named), "structured_output")
        raise InvalidRequestError(
            f"{argument} must be left out beside tools where {parser.name} reads the calls of the "
            "model: it is code of a plugin, and no grammar knows what it reads",
            argument=argument,
        )
    if held is not None and held.required and not parser.opens:
        raise InvalidRequestError(
            "required_tools must be empty where the model writes calls as "
            f"{parser.name} reads them, without a mark; a structured_output of calls requires them",
            argument="required_tools",
            value=sorted(held.required),
        )


def answer_constraints(
    strict_tools: object,
    required_tools: object,
    parallel_tool_calls: object,
    max_whitespace: object,
    *,
    is_structured: bool,
    form: StructuredOutput | None,
) -> AnswerConstraints | None:
    """Check the constraints on answers; return None if there are none.

    `is_structured`: the request has a structured output. `form`: the structured output of answers
    without calls. Raises `InvalidRequestError`.
    """
    names = sequence(text(0), MAX_TOOLS)  # unknown names are reported by place
    strict = frozenset(check(InvalidRequestError, "strict_tools", strict_tools, names))
    required = frozenset(check(InvalidRequestError, "required_tools", required_tools, names))
    parallel = check(InvalidRequestError, "parallel_tool_calls", parallel_tool_calls, boolean)
    rule = optional(integer(0, MAX_WHITESPACE))
    space = check(InvalidRequestError, "max_whitespace", max_whitespace, rule)
    values = {"parallel_tool_calls": (parallel, True), "max_whitespace": (space, None)}
    is_held = bool(strict or required) or form is not None
    for name, (value, plain) in values.items():
        if not is_held and value is not plain:
            raise InvalidRequestError(
                f"{name} must be {plain} without strict_tools, required_tools or a form beside "
                f"tools, got {value}",
                argument=name,
                value=value,
            )
    if strict and is_structured and form is None:
        raise InvalidRequestError(
            "strict_tools must be empty where structured_output is about all of the completion",
            argument="strict_tools",
            value=strict_tools,
        )
    if required and is_structured:
        raise InvalidRequestError(
            "required_tools must be empty beside a structured_output: the completion is calls",
            argument="required_tools",
            value=required_tools,
        )
    return AnswerConstraints(strict, not parallel, space, form, required) if is_held else None
