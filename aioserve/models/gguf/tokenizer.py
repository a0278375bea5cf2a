"""Translation of a GGUF file's tokenizer into the tokenizer.json that the model came with.

Two kinds of vocabulary are known:

- "llama": SentencePiece's BPE, whose merges follow from scores.
- "gpt2": byte-level BPE with merges. A name (`tokenizer.ggml.pre`) tells the cuts before merges;
  `pre_tokenizers` has their rules.

Others are refused by name. No files and no torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import ModelError
from aioserve.isolation import shown
from aioserve.models.fields import Fields
from aioserve.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from aioserve.text.ends import end_ids, named_ends

__all__ = ["SPACE", "GGUFVocabulary", "TokenKind"]

MAX_TOKEN_CHARS = 256
"""Longest token, as every way to compose it of two others is tried."""
MAX_VOCABULARY_CHARS = 1 << 23
"""Most characters of all tokens together. A vocabulary of 262,144 tokens has two million."""
MAX_MERGES = 1 << 21
"""Most merges of a vocabulary, four times those of one with 262,144 tokens."""
TEMPLATE_KEYS = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
"""Keys of the chat template, and of the template for prompts with tools."""
_KEY = "tokenizer.ggml."
SPACE = "\u2581"
"""Character that SentencePiece writes for a space."""
_NO_TOKEN = (-1, 2**32 - 1)
"""Ids that some files write for a token that doesn't exist."""
_UNUSED_MAY_BE_WRONG = ("unknown_token_id", "padding_token_id")
"""Keys that may have invalid ids unless the chat template uses them.

Nothing else reads them: byte-level vocabularies have no unknown token."""
_PIECE = 2000
"""Number of JSON entries that one call encodes, in less than a millisecond."""
_PADDING = re.compile(r"\[PAD\d+\]")


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_UNUSED = int(TokenKind.UNUSED)


class GGUFVocabulary:
    """Tokens and rules of one file. `source` names it in errors.

    Raises `UnsupportedModelError` for unknown kinds of tokenizers, and `ModelError` for
    inconsistent metadata; both name file and key.
    """

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._fields = Fields(
            {k.removeprefix(_KEY): v for k, v in metadata.items() if k.startswith(_KEY)},
            source,
            _KEY,
        )
        self._source = source
        self._architecture = metadata.get("general.architecture")
        self._templates = {key: metadata[key] for key in TEMPLATE_KEYS if key in metadata}
        self._kind = self._fields.text("model")
        if self._kind not in ("llama", "gpt2"):
            self._fields.unsupported("model", "known are llama (SentencePiece) and gpt2 (bytes)")
        self.tokens: list[str] = self._texts("tokens")
        self.kinds: list[int] = self._numbers("token_type", TokenKind.NORMAL, np.integer).tolist()
        self._ids = self._unique_ids()
        self.bos_token_id: int | None = self._token_id("bos_token_id")
        """Id of the token that begins a sequence, or None."""
        begins = (self.bos_token_id,)
        said = [self._token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        self.eos_token_ids: tuple[int, ...] = end_ids(said, self._ids.get, begins)
        """Ids of the tokens that end a completion, those named by the file first."""
        for token_id in named_ends(self._ids.get, begins).values():
            self.kinds[token_id] = TokenKind.CONTROL  # some files mark them as text

    @property
    def chat_template(self) -> str | None:
        """Source of the template in Jinja. Raises `ModelError` if it isn't text."""
        return self._template(TEMPLATE_KEYS[0])

    @property
    def tool_use_template(self) -> str | None:
        """Source of the template for prompts with tools. Raises `ModelError` if it isn't text."""
        return self._template(TEMPLATE_KEYS[1])

    def _template(self, key: str) -> str | None:
        value = self._templates.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self._source}: {key} must be a string, got {shown(value)}")
        return value

    @property
    def special_tokens(self) -> dict[str, str]:
        """Tokens that templates name: bos_token, eos_token, unk_token, pad_token."""
        names = {
            "bos_token": "bos_token_id",
            "eos_token": "eos_token_id",
            "unk_token": "unknown_token_id",
            "pad_token": "padding_token_id",
        }
        template = self.chat_template or ""
        ids = {
            name: self._token_id(key)
            for name, key in names.items()
            if key not in _UNUSED_MAY_BE_WRONG or self._is_id(key) or name in template
        }
        return {name: self.tokens[i] for name, i in ids.items() if i is not None}

    def tokenizer_json(self) -> bytes:
        """Make the content of a tokenizer.json."""
        parts = self._sentencepiece() if self._kind == "llama" else self._byte_level()
        return msgspec.json.encode(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": list(self._added_tokens()),
                "post_processor": self._frame(),
                **parts,
            }
        )

    # -- the kinds

    def _sentencepiece(self) -> dict[str, Any]:
        prefix = self._fields.flag("add_space_prefix", True)
        spelled = [self._spelled(token) for token in self.tokens]
        normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] * prefix
        normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._token_id("unknown_token_id")
        model = {
            "unk_token": None if unknown is None else spelled[unknown],
            "fuse_unk": True,
            "byte_fallback": TokenKind.BYTE in self.kinds,
            "merges": _in_pieces(b"[]", self._merges_of_scores(spelled)),
        }
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._model(spelled, model),
        }

    def _byte_level(self) -> dict[str, Any]:
        name = self._fields.text("pre")
        if (rules := PRE_TOKENIZERS.get(name)) is None:
            self._fields.unsupported(
                "pre", f"how text is cut is known for {', '.join(PRE_TOKENIZERS)}"
            )
        model = {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rules.ignore_merges,
            "merges": _in_pieces(b"[]", self._listed_merges()),
        }
        return {
            "normalizer": {"type": "NFC"} if rules.composes else None,
            "pre_tokenizer": rules.pre_tokenizer(),
            "decoder": {"type": "ByteLevel"}
            | dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), True),
            "model": self._model(self.tokens, model),
        }

    def _model(self, spelled: Sequence[str], fields: dict[str, Any]) -> dict[str, Any]:
        ids = ((token, i) for i, token in enumerate(spelled) if self._is_one(i))
        return {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "vocab": _in_pieces(b"{}", ids),
            **fields,
        }

    def _is_one(self, token_id: int) -> bool:
        """False for entries that pad the vocabulary to the rows of the embedding."""
        token = self.tokens[token_id]
        return bool(token) and not (self.kinds[token_id] == _UNUSED and _PADDING.fullmatch(token))

    def _spelled(self, token: str) -> str:
        """Spell a token as SentencePiece does. Files spell runs of spaces with plain spaces."""
        return token if token.strip(" ") else token.replace(" ", SPACE)

    def _listed_merges(self) -> Iterator[tuple[str, str]]:
        for line in self._texts("merges"):
            left, _, right = line.partition(" ")
            if not left or not right or " " in right:
                self._fields.invalid("merges", f"pairs with a space between, not {shown(line)}")
            yield left, right

    def _merges_of_scores(self, spelled: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield each way to make a token of two others, for tokens by falling score.

        User-defined tokens come before learned ones. Control tokens and bytes are never made."""
        scores = self._numbers("scores", 0.0, np.floating)
        kinds = np.array(self.kinds)
        defined = np.flatnonzero(kinds == TokenKind.USER_DEFINED).tolist()
        learned = np.flatnonzero(np.isin(kinds, (TokenKind.NORMAL, TokenKind.UNUSED)))
        learned = learned[np.argsort(-scores[learned], kind="stable")].tolist()
        parts = {spelled[token_id] for token_id in (*defined, *learned)}
        count = 0
        for token_id in (*defined, *learned):
            token = spelled[token_id]
            for cut in range(len(token) - 1, 0, -1):
                left, right = token[:cut], token[cut:]
                if left in parts and right in parts:
                    count += 1
                    if count > MAX_MERGES:
                        raise ModelError(
                            f"{self._source}: {_KEY}tokens are made of each other in more than "
                            f"{MAX_MERGES} ways"
                        )
                    yield left, right

    # -- parts that both kinds have

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        """Yield the tokens that are searched in text before it is cut."""
        marked = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
        for token_id, kind in enumerate(self.kinds):
            if kind not in marked or not self._is_one(token_id):
                continue
            token = self.tokens[token_id]
            yield {
                "id": token_id,
                "content": self._spelled(token) if self._kind == "llama" else token,
                "single_word": False,
                "lstrip": False,
                "rstrip": self._swallows_space(token),
                "normalized": False,
                "special": kind != TokenKind.USER_DEFINED,
            }

    def _swallows_space(self, token: str) -> bool:
        """True for Phi-3's marks, which take the white space behind them; files lack this rule."""
        phi = self._architecture == "phi3" and self._kind == "llama"
        return phi and token not in ("<unk>", "<s>", "<|endoftext|>")

    def _frame(self) -> dict[str, Any] | None:
        """Make the post-processor, which puts tokens before and behind each text, or None."""
        by_default = self._kind == "llama"
        if not by_default:
            rules = PRE_TOKENIZERS.get(self._fields.text("pre"))
            by_default = rules is not None and rules.adds_bos
        before = self._added("bos_token_id", self._fields.flag("add_bos_token", by_default))
        behind = self._added("eos_token_id", self._fields.flag("add_eos_token", False))
        if not before and not behind:
            return None
        both = {self.tokens[i]: i for i in (*before, *behind)}

        def marks(ids: Sequence[int]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": self.tokens[i], "type_id": 0}} for i in ids]

        def text(name: str) -> list[dict[str, Any]]:
            return [*marks(before), {"Sequence": {"id": name, "type_id": 0}}, *marks(behind)]

        return {
            "type": "TemplateProcessing",
            "single": text("A"),
            "pair": text("A") + text("B"),
            "special_tokens": {
                token: {"id": token, "ids": [i], "tokens": [token]} for token, i in both.items()
            },
        }

    def _added(self, name: str, wanted: bool) -> list[int]:
        token_id = self._token_id(name) if wanted else None
        if wanted and token_id is None and self._fields.has(f"add_{name[:3]}_token"):
            self._fields.invalid(name, f"there, since add_{name[:3]}_token is true")
        return [] if token_id is None else [token_id]

    # -- reading

    def _token_id(self, name: str) -> int | None:
        value = self._fields.values.get(name)
        if value is None or (isinstance(value, int) and value in _NO_TOKEN):
            return None
        return self._fields.integer(name, least=0, most=len(self.tokens) - 1)

    def _is_id(self, name: str) -> bool:
        value = self._fields.values.get(name)
        return isinstance(value, int) and 0 <= value < len(self.tokens)

    def _texts(self, name: str) -> list[str]:
        found = self._fields.values.get(name)
        if not isinstance(found, list):
            self._fields.invalid(name, "an array of strings")
        return found

    def _numbers(self, name: str, default: float, kind: type) -> npt.NDArray[Any]:
        found = self._fields.values.get(name)
        if found is None:
            return np.full(len(self.tokens), default)
        if (
            not isinstance(found, np.ndarray)
            or len(found) != len(self.tokens)
            or not np.issubdtype(found.dtype, kind)
        ):
            self._fields.invalid(
                name, f"an array with a number for each of {len(self.tokens)} tokens"
            )
        return found

    def _unique_ids(self) -> dict[str, int]:
        if not self.tokens:
            self._fields.invalid("tokens", "at least one token")
        if (characters := sum(map(len, self.tokens))) > MAX_VOCABULARY_CHARS:
            raise ModelError(
                f"{self._source}: {_KEY}tokens have {characters} characters together, must have at "
                f"most {MAX_VOCABULARY_CHARS}"
            )
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if len(token) > MAX_TOKEN_CHARS:
                raise ModelError(
                    f"{self._source}: token {token_id} has {len(token)} characters, must have at "
                    f"most {MAX_TOKEN_CHARS}"
                )
            if token and ids.setdefault(token, token_id) != token_id:
                raise ModelError(
                    f"{self._source}: {shown(token)} is token {ids[token]} and token {token_id}"
                )
        return ids


def _in_pieces(brackets: bytes, entries: Iterable[tuple[str, Any]]) -> msgspec.Raw:
    """Encode entries as JSON, in several calls: as an array of pairs, [], or an object, {}.

    One long call would hold the GIL, for which the event loop of the process waits."""
    pieces, left = [], iter(entries)
    while piece := list(islice(left, _PIECE)):
        pieces.append(msgspec.json.encode(piece if brackets == b"[]" else dict(piece))[1:-1])
    return msgspec.Raw(brackets[:1] + b",".join(pieces) + brackets[1:])
