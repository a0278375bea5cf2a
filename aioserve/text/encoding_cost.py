"""Bounds on the work of a tokenizer before it has tokens, by the steps of its file.

Normalizers and the steps after them replace characters by several, and consecutive ones multiply:
forty that double make a trillion of one. A file like that is refused. Regular expressions may
backtrack, for a time that is a power of the text's length, or doubles with each character. A
tokenizer with slow expressions encodes only on threads.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from aioserve.errors import UnsupportedModelError

__all__ = ["is_quick"]

MAX_GROWTH = 256
"""Most characters that one may become. Normalisers in use make a few dozen at most."""
QUICK_GROWTH = 64
BYTE_GROWTH = 4
"""Characters from one: it has up to four bytes, each of which becomes one."""
SPACED_GROWTH = 3
"""Characters from one: itself, with a space before and after it."""
MAX_REPEATS = 2
"""Most unbounded repeats in one alternative of a quick expression: it takes at most the square of a
text's length.
"""


def is_quick(backend: tokenizers.Tokenizer, source: str) -> bool:
    """Return true if short texts are encoded in no time.

    Raises `UnsupportedModelError` for steps that multiply a text by more than `MAX_GROWTH`;
    `source` names the tokenizer.
    """
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    growth = 1
    for step in steps:
        growth = min(growth * _growth(step), MAX_GROWTH + 1)
    if growth > MAX_GROWTH:
        raise UnsupportedModelError(
            f"{source}: its normalizer and pre_tokenizer must make at most {MAX_GROWTH} "
            "characters of one, and may make more"
        )
    return growth <= QUICK_GROWTH and all(map(_is_quick, filter(None, map(_expression, steps))))


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the single steps of a normalizer or a pre-tokenizer, as the file writes them."""
    if part is None:
        return
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        inner = step.get("normalizers", step.get("pretokenizers"))
        if isinstance(inner, list):
            waiting += reversed(inner)
        else:
            yield step


def _growth(step: Mapping[str, Any]) -> int:
    """Return the most characters that a step makes of one, if repeating it makes more again.

    The normal forms of Unicode don't.
    """
    match step.get("type"):
        case "Replace":
            text = step["pattern"].get("String")
            if text:
                return max(1, -(-len(step["content"]) // len(text)))
            return 1 + len(step["content"])  # an expression may match "" before each one
        case "Prepend":
            return 1 + len(step["prepend"])
        case "Precompiled":
            return _longest(step["precompiled_charsmap"])
        case "ByteLevel":
            return BYTE_GROWTH
        case "BertNormalizer" if step["handle_chinese_chars"]:
            return SPACED_GROWTH
        case _:
            return 1


def _longest(charsmap: str) -> int:
    """Return the most characters that a SentencePiece map writes for one.

    The data has a table, whose size comes first, and then texts, each with a zero after it.
    """
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :].decode(errors="replace")
    return max(map(len, texts.split("\0")), default=1) or 1


def _expression(step: Mapping[str, Any]) -> str | None:
    pattern = step.get("pattern")
    return pattern.get("Regex") if isinstance(pattern, dict) else None


_PART = re.compile(
    r"\\.|\[\^?\]?(?:\\.|\[:[a-z]+:\]|[^\]\\])*\]|\(\?(?:[a-z-]*:|[=!>]|<[=!])|[()|]|[*+]|\{\d+(?:,\d*)?\}|.",
    re.DOTALL,
)
_ENDLESS = re.compile(r"[*+]|\{\d+,\}")
_COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def _is_quick(expression: str) -> bool:
    """Return true if no repeated group contains unbounded repeats, and no alternative has many."""
    outer: list[tuple[int, int, bool]] = []
    most = here = at = 0
    varies = False  # in number, within this group
    while (part := _PART.match(expression, at)) is not None:
        at = part.end()
        if part[0][0] == "(":
            outer.append((most, here, varies))
            most, here, varies = 0, 0, False
        elif part[0] == "|":
            most, here = max(most, here), 0
        elif part[0] == ")" and outer:
            inside, did_vary = max(most, here), varies
            most, here, varies = outer.pop()
            here, varies = here + inside, varies or did_vary
            if did_vary and (_ENDLESS.match(expression, at) or _COUNTED.match(expression, at)):
                return False
        elif _ENDLESS.fullmatch(part[0]):
            here, varies = here + 1, True
        elif counted := _COUNTED.fullmatch(part[0]):
            varies |= counted[2] not in (None, counted[1])
    return max(most, here) <= MAX_REPEATS
