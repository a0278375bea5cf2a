"""Known forms of tool calls and reasoning, by name, and the form that a chat template is written
for.

Names are those that vLLM has for its parsers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from aioserve.arguments import check, choice
from aioserve.errors import InvalidRequestError
from aioserve.text.output_parsers import hermes, json_calls, llama3_json, mistral
from aioserve.text.output_parsers.tool_parser import ToolParser

__all__ = [
    "REASONING_FORMS",
    "TOOL_FORMS",
    "ReasoningForm",
    "ToolForm",
    "reasoning_form",
    "tells_tool_form",
    "tool_form",
]

MAX_BEGUN_CHARS = 2**20
"""Most characters searched, so that a long message doesn't hold the event loop."""

_NAMED = re.compile(r"\{#[-+]?\s*tool_parser:\s*(\w+)\s*[-+]?#\}")
"""A comment in which a template says for which form it is written."""


class ToolForm(msgspec.Struct, frozen=True):
    """Form in which a family writes tool calls."""

    name: str
    parser: Callable[[], ToolParser]
    marks: tuple[str, ...]
    """Marks, which may be special tokens; the completion's text has them all the same."""
    is_of: Callable[[str], bool]
    """Whether a template is written for it."""


class ReasoningForm(msgspec.Struct, frozen=True):
    """The tags around reasoning."""

    opens: str
    closes: str
    is_open: bool
    """Whether a completion begins with reasoning, whatever the prompt ends with."""
    is_of: Callable[[str], bool]

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


def _is_hermes(source: str) -> bool:
    # Others have the same tag around what is no JSON (Qwen3-Coder, GLM).
    return hermes.OPENS in source and "<function=" not in source and "<arg_key>" not in source


def _is_llama3_json(source: str) -> bool:
    return llama3_json.TAG in source or (
        "<|start_header_id|>" in source and '"parameters"' in source
    )


TOOL_FORMS: Mapping[str, ToolForm] = {
    "hermes": ToolForm("hermes", hermes.HermesParser, (hermes.OPENS, hermes.CLOSES), _is_hermes),
    "llama3_json": ToolForm(
        "llama3_json", llama3_json.Llama3JsonParser, (llama3_json.TAG,), _is_llama3_json
    ),
    "mistral": ToolForm(
        "mistral",
        mistral.MistralParser,
        (mistral.CALLS, mistral.CALL_ID, mistral.ARGS),
        lambda source: mistral.CALLS in source,
    ),
    "json": ToolForm("json", json_calls.JsonCallsParser, (), lambda source: False),
}
REASONING_FORMS: Mapping[str, ReasoningForm] = {
    "qwen3": ReasoningForm("<think>", "</think>", False, lambda source: "</think>" in source),
    "deepseek_r1": ReasoningForm("<think>", "</think>", True, lambda source: False),
    "mistral": ReasoningForm("[THINK]", "[/THINK]", False, lambda source: "[/THINK]" in source),
}


def tool_form(name: object, source: str, *, has_tools: bool) -> ToolForm | None:
    """Form of that name; for "auto" the template's form, if there are tools. Raises
    `InvalidRequestError` for an unknown name, and where none is known for a template with tools."""
    name = _checked("tool_parser", name, TOOL_FORMS)
    if name == "auto":
        if not has_tools:
            return None
        if (form := _form_in(source)) is not None:
            return form
        raise InvalidRequestError(
            "tool_parser must be named, one of "
            f"{', '.join(TOOL_FORMS)}, as nothing in the chat template tells in which form the "
            "model calls tools; with 'none' calls are text",
            argument="tool_parser",
            value="auto",
        )
    return TOOL_FORMS.get(name)


def tells_tool_form(source: str) -> bool:
    """Whether a template tells in which form its model calls tools."""
    return _form_in(source) is not None


def _form_in(source: str) -> ToolForm | None:
    named = _NAMED.search(source)
    if named is not None and named[1] in TOOL_FORMS:
        return TOOL_FORMS[named[1]]
    return next((form for form in TOOL_FORMS.values() if form.is_of(source)), None)


def reasoning_form(name: object, source: str) -> ReasoningForm | None:
    """Form of that name; for "auto" the template's form, None if it has none. Raises
    `InvalidRequestError` for an unknown name."""
    name = _checked("reasoning_parser", name, REASONING_FORMS)
    if name == "auto":
        return next((form for form in REASONING_FORMS.values() if form.is_of(source)), None)
    return REASONING_FORMS.get(name)


def _checked(argument: str, name: object, forms: Mapping[str, object]) -> str:
    return check(InvalidRequestError, argument, name, choice("auto", "none", *forms))
