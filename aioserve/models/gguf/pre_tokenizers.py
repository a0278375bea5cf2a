"""Rules by which byte-level vocabularies cut text before merges, by their names in GGUF files.

A file has only a name, `tokenizer.ggml.pre = "llama-bpe"`, whose meaning converters and readers
share. The rules here are those of the models' original tokenizers. An unknown name is refused:
other cuts would give other tokens, without any other sign.
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
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Most letters that have cases, from the tokenizer's own expression."""
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _IDEOGRAPHS,
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "|".join(
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            _SPACES,
        )
    ),
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    _IDEOGRAPHS,
)


class PreTokenizer(NamedTuple):
    """Rules of one name."""

    splits: tuple[str, ...] = ()
    """Expressions that cut one after the other. Matches and the text between become pieces."""
    digits: bool = False
    """True if each digit is a piece."""
    words: bool = False
    """True if GPT-2's expression cuts last."""
    ignore_merges: bool = False
    """True if a piece that is a token stays whole, whatever merges would make of it."""
    composes: bool = False
    """True if text is brought into Unicode's composed form (NFC) first."""
    adds_bos: bool = False
    """True if texts begin with BOS, unless the file has another setting."""

    def pre_tokenizer(self) -> dict[str, Any]:
        """Make the `pre_tokenizer` of a tokenizer.json."""
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
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM, digits=True),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
}
"""Known names with their rules."""
