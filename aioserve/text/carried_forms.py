"""Forms of a conversation that carries tool calls back. Templates differ in the forms that they
take.

    contents   as they are   None where a call stands alone, or ""
               texts         "" for None: some templates fail on None, or write "None"
               nones         None for "" beside calls: some leave the calls out otherwise
    arguments  as they are   objects, as most want them; what is no JSON of an object is text
               texts         for templates that join them to other text
               objects       for templates that go through them: what is text is below `BROKEN`

All forms say the same. The first that a template takes is rendered, beginning with the form that it
prefers for a small conversation. Must not know how a template is rendered.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from aioserve.text.conversation import Conversation

__all__ = ["BROKEN", "Form", "forms_of", "preferred_form", "shaped"]

BROKEN = "INVALID_JSON"
"""Key of arguments that are no object, for a template that takes only objects."""

Contents = Literal["as_they_are", "texts", "nones"]
Arguments = Literal["as_they_are", "texts", "objects"]


class Form(NamedTuple):
    """One form of a conversation."""

    contents: Contents = "as_they_are"
    arguments: Arguments = "as_they_are"


def forms_of(conversation: Conversation, first: Form) -> list[Form]:
    """List the forms that differ for these messages. The first is `first`, or its equal."""
    contents: list[Contents] = ["as_they_are"]
    arguments: list[Arguments] = ["as_they_are"]
    calling = [message for message in conversation.messages if message.get("tool_calls")]
    if any(message.get("content") is None for message in calling):
        contents.append("texts")
    if any(message.get("content") == "" for message in calling):
        contents.append("nones")
    given = [call["function"]["arguments"] for message in calling for call in message["tool_calls"]]
    if any(isinstance(one, dict) for one in given):
        arguments.append("texts")
    if any(isinstance(one, str) for one in given):
        arguments.append("objects")
    same = Form(
        first.contents if first.contents in contents else "as_they_are",
        first.arguments if first.arguments in arguments else "as_they_are",
    )
    forms = [Form(*pair) for pair in itertools.product(contents, arguments)]
    return sorted(forms, key=lambda form: form != same)


def shaped(conversation: Conversation, form: Form) -> Conversation:
    """Return the conversation in that form."""
    if form == Form():
        return conversation
    messages = [
        _shaped(message, form) if message.get("tool_calls") else message
        for message in conversation.messages
    ]
    return msgspec.structs.replace(conversation, messages=messages)


def _shaped(message: dict[str, Any], form: Form) -> dict[str, Any]:
    content = message.get("content")
    if form.contents == "texts" and content is None:
        message = message | {"content": ""}
    elif form.contents == "nones" and content == "":
        message = message | {"content": None}
    if form.arguments == "as_they_are":
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if form.arguments == "texts" and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif form.arguments == "objects" and isinstance(arguments, str):
            arguments = {BROKEN: arguments}
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


_SEEN = "lighthouse"
"""Word that is in the text if the template writes calls."""
_CALL: dict[str, Any] = {
    "id": "call00001",  # every template takes this kind of id
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": _SEEN}},
}
_RESULT = {"role": "tool", "content": "tower", "tool_call_id": "call00001", "name": "look_up"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


_FORMS = [
    Form(contents, arguments)
    for contents in ("as_they_are", "texts", "nones")
    for arguments in ("as_they_are", "texts")
]


def preferred_form(render: Callable[[Conversation], str | None], *, reads_tools: bool) -> Form:
    """Find the form in which a template takes calls that stand alone.

    It is the first that shows the call, or else the first that it takes. For a conversation that
    the template doesn't take, `render` returns None.
    """

    def rendered(form: Form, content: str | None) -> str | None:
        calling = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
        messages = [{"role": "user", "content": "hi"}, calling, _RESULT]
        example = Conversation(messages, [_TOOL] if reads_tools else None)
        return render(shaped(example, form))

    taken: list[Form] = []
    for form in _FORMS:
        texts = [rendered(form, content) for content in (None, "")]
        most = _num_nones(rendered(form, "x"))
        if any(text is None or _num_nones(text) > most for text in texts):
            continue
        if all(_SEEN in (text or "") for text in texts):
            return form
        taken.append(form)
    return taken[0] if taken else Form()


def _num_nones(text: str | None) -> int:
    """Count "none" in a text. A template writes it for a missing value."""
    return 0 if text is None else text.lower().count("none")
