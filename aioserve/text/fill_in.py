"""Prompts for filling the gap between two texts: fill in the middle (FIM).

Models that were trained for it know three marks, each a single token. The forms are those of Qwen
Coder, StarCoder and CodeGemma, Granite, DeepSeek Coder, and Codestral. See Bavarian et al.,
"Efficient Training of Language Models to Fill in the Middle", 2022.
"""

from __future__ import annotations

import re

from aioserve.text.tokenizer import Tokenizer

__all__ = ["fill_in_of", "filled_in"]

FORMS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    "<\uff5cfim\u2581begin\uff5c>{prefix}<\uff5cfim\u2581hole\uff5c>{suffix}<\uff5cfim\u2581end\uff5c>",
    "[SUFFIX]{suffix}[PREFIX]{prefix}",
)


def fill_in_of(tokenizer: Tokenizer) -> str | None:
    """Return the form of prompts with a gap, with `{prefix}` and `{suffix}` in it.

    None if the tokenizer has no form's marks as tokens.
    """
    return next((form for form in FORMS if _knows(tokenizer, form)), None)


def filled_in(form: str, prefix: str, suffix: str) -> str:
    """Return the prompt of a gap between two texts."""
    parts = {"{prefix}": prefix, "{suffix}": suffix}
    return "".join([parts.get(part, part) for part in re.split(r"(\{\w+\})", form)])


def _knows(tokenizer: Tokenizer, form: str) -> bool:
    marks = [mark for mark in re.split(r"\{\w+\}", form) if mark]
    return all(len(tokenizer.encode(mark, add_special_tokens=False)) == 1 for mark in marks)
