"""Marks with which a chat template closes turns, beside the tokens that end answers.

A model writes what its template wrote in training. If that closes a turn with a token that doesn't
end answers, the model writes the token and goes on with turns of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from aioserve.errors import InvalidPromptError, RequestFailedError
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.tokenizer import Tokenizer

__all__ = ["unended_mark"]

_ASKED, _ANSWERED = "q7391", "a8264"
"""Words that no template has."""
_TURN = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}]
_WRITTEN_MARK = re.compile("<[|\uff5c][^<>|\uff5c]+[|\uff5c]>")


def unended_mark(
    template: ChatTemplate, tokenizer: Tokenizer, end_ids: Collection[int]
) -> str | None:
    """Return the name of the mark after the assistant's turns, if it is none of `end_ids`.

    None if an answer ends there, if no mark closes turns, and if the template doesn't take these
    turns.
    """
    marks: list[str] = []
    for messages in (_TURN, [*_TURN, _TURN[0]]):
        mark = _mark_behind(template, tokenizer, messages)
        if mark is None:
            continue
        if tokenizer.id_of(mark) in end_ids:
            return None
        marks.append(mark)
    return marks[0] if marks else None


def _mark_behind(
    template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, str]]
) -> str | None:
    """Return the first mark that is written after the answer."""
    try:
        text = template.render(messages, add_generation_prompt=False)
    except (InvalidPromptError, RequestFailedError):
        return None
    _, answer, behind = text.rpartition(_ANSWERED)
    if not answer:
        return None
    if (written := _WRITTEN_MARK.match(behind.lstrip())) is not None:
        return written[0]
    ids = tokenizer.encode(behind, add_special_tokens=False)
    names = tokenizer.special_names
    return next((names[one] for one in ids if one in names), None)
