"""How byte-level vocabularies cut text before their merges, by the name that GGUF files give.

A file says `tokenizer.ggml.pre = "llama-bpe"`, and what that means is agreed on between converters
and readers. The rules here are those of the tokenizers that the models came with. A name that isn't
here is refused: other cuts give other tokens, without any other sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words_by_case(ending: str = "") -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{_UPPER}*{_LOWER}+{ending}|{lead}{_UPPER}+{_LOWER}*{ending}"


_LLAMA3 = "|".join((_ENGLISH, _LETTERS, r"\p{N}{1,3}", _SIGNS, _SPACES))
_QWEN2 = "|".join((_ENGLISH, _LETTERS, r"\p{N}", _SIGNS, _SPACES))
_GPT4O = "|".join((_words_by_case(f"{_ENGLISH}?"), r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _SPACES))
_TEKKEN = "|".join((_words_by_case(), r"\p{N}", _SIGNS_AND_SLASHES, _SPACES))
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)


class PreTokenizer(NamedTuple):
    """Rules of one name."""

    splits: tuple[str, ...] = ()
    """Expressions that cut one after the other: what matches is a piece, and what is between."""
    digits: bool = False
    """Each digit is a piece."""
    words: bool = False
    """GPT-2's expression cuts last."""
    ignore_merges: bool = False
    """A piece that is a token is one, whatever the merges make of it."""
    composes: bool = False
    """Text is brought into Unicode's composed form (NFC) first."""
    adds_bos: bool = False
    """Unless the file says otherwise."""

    def pre_tokenizer(self) -> dict[str, Any]:
        """As tokenizer.json has it."""
        parts: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
            for split in self.splits
        ]
        if self.digits:
            parts.append({"type": "Digits", "individual_digits": True})
        parts.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": self.words,
            }
        )
        return {"type": "Sequence", "pretokenizers": parts}


_OF_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_OF_GPT2 = PreTokenizer(words=True)
_OF_STARCODER = PreTokenizer(digits=True, words=True)
_OF_GPT4O = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "llama-bpe": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "falcon3": _OF_LLAMA3,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), composes=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "gpt-2": _OF_GPT2,
    "phi-2": _OF_GPT2,
    "gpt-4o": _OF_GPT4O,
    "llama4": _OF_GPT4O,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "smollm": _OF_STARCODER,
    "starcoder": _OF_STARCODER,
    "refact": _OF_STARCODER,
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER, digits=True),
}
"""Every name that is known."""
