"""Tokenizer of a model directory: text to ids and back.

Wraps the `tokenizers` library over `tokenizer.json`. Knows that file alone; must not know torch,
requests or streams. Truncation and padding are switched off at load and nothing changes afterwards,
so one tokenizer serves any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from aioserve.arguments import boolean, check, integer, sequence
from aioserve.errors import InvalidPromptError, ModelError, UnsupportedModelError
from aioserve.text import library
from aioserve.text.encoding_cost import is_quick
from aioserve.text.ends import mark_ends
from aioserve.text.special_tokens import SpecialTokens
from aioserve.text.token_bytes import PieceTable
from aioserve.text.tokenizer_file import one_past_highest_id, read_tokenizer

__all__ = ["Tokenizer", "why_no_tokenizer"]

MAX_IDS = 1 << 22
SOURCES = ("tokenizer.model", "vocab.json")
"""Files that the transformers library makes a tokenizer.json from."""


def why_no_tokenizer(path: Path | str) -> str | None:
    """Return why no tokenizer can be read from the model directory `path`, and what to do.

    None if there is a file to read.
    """
    directory = Path(path)
    if (directory / "tokenizer.json").is_file():
        return None
    there = next((name for name in SOURCES if (directory / name).is_file()), None)
    if there is None:
        return (
            f"{directory} has no tokenizer.json: put the one there that the model was trained with"
        )
    libraries = "transformers sentencepiece protobuf" if there.endswith("model") else "transformers"
    place = repr(str(directory))
    return (
        f"{directory} has {there} and no tokenizer.json: make one with `pip install {libraries}` "
        f"and `from transformers import AutoTokenizer; "
        f"AutoTokenizer.from_pretrained({place}).save_pretrained({place})`"
    )


class Tokenizer:
    """Encoder and decoder of text; thread-safe.

    Nothing may change `backend` afterwards; its tokens that end answers are made special. In error
    messages, `source` names it. One past its highest id is `vocab_size`; leave it out if it isn't
    known.

    Raises `UnsupportedModelError` for a decoder that can't be streamed exactly, for dropout, and
    for steps that multiply a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str = "tokenizer",
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        mark_ends(backend)
        if getattr(backend.model, "dropout", None):
            raise UnsupportedModelError(
                f"{source}: dropout must be left out of its model, got {backend.model.dropout}: it "
                "draws the tokens of a text anew each time"
            )
        self.is_quick: bool = is_quick(backend, source)
        """True if short texts are encoded in no time. If false, encode only on a thread."""
        self._backend = backend
        self._source = source
        self.pieces: PieceTable = PieceTable(backend, source)
        """Text that each id adds; the incremental detokenizer's input."""
        self.vocab_size: int = one_past_highest_id(backend) if vocab_size is None else vocab_size
        """One past the highest id, added tokens included. A model's logits may be wider."""
        self.special_names: dict[int, str] = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        """Names of the ids that `decode` leaves out unless told otherwise."""
        self._special = {content: token_id for token_id, content in self.special_names.items()}
        self.special_ids: frozenset[int] = frozenset(self.special_names)

    def __repr__(self) -> str:
        return f"Tokenizer({self._source!r}, vocab_size={self.vocab_size})"

    @classmethod
    def from_directory(cls, path: Path | str) -> Tokenizer:
        """Load `path`/tokenizer.json. Raises `ModelError` naming the file if that fails."""
        if (missing := why_no_tokenizer(path)) is not None:
            raise ModelError(missing)
        file = Path(path) / "tokenizer.json"
        backend, vocab_size = read_tokenizer(file)
        return cls(backend, source=str(file), vocab_size=vocab_size)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Special tokens, kept apart from the text of messages.

        Made when first used, which may take a while: use it in a thread.
        """
        return SpecialTokens(self._backend, self._source, is_quick=self.is_quick)

    @cached_property
    def frame(self) -> tuple[int, int]:
        """Number of special tokens before and after a text that is encoded with them."""
        plain = self.encode("a", add_special_tokens=False)
        framed = self.encode("a")
        for before in range(len(framed) - len(plain) + 1):
            if framed[before : before + len(plain)] == plain:
                return before, len(framed) - len(plain) - before
        return 0, 0

    def id_of(self, token: str) -> int | None:
        """Return the id of the token of that name; None if the vocabulary doesn't have it."""
        return self._backend.token_to_id(token)

    def special_among(self, names: Iterable[str]) -> dict[int, str]:
        """Return the special tokens among `names`, by their ids."""
        return {self._special[name]: name for name in names if name in self._special}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of `text`; with `add_special_tokens`, framed as the model expects
        (BOS, say).

        Special tokens that are written out in `text` are recognised. Raises `InvalidPromptError` if
        `text` isn't a str that can be encoded as UTF-8 (a lone surrogate can't). Raises
        `PromptTooLongError` if it has more than `max_tokens`.
        """
        if not isinstance(text, str):
            raise InvalidPromptError(f"text must be a str, got {type(text).__name__}")
        text = str.__str__(text)  # the characters of a subclass, not what its methods say
        check(InvalidPromptError, "add_special_tokens", add_special_tokens, boolean)
        try:
            return library.encode_ids(
                self._backend,
                text,
                add_special_tokens=add_special_tokens,
                max_tokens=max_tokens,
                is_quick=self.is_quick,
            )
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidPromptError(f"text can't be encoded as UTF-8: {_why(text)}") from error

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the ids of `word` at the start of a text, and after a space.

        A vocabulary may have other ways to the same text; these are the ones that a model takes.
        """
        ways = (word, " " + word.lstrip(" "))
        every = [tuple(self.encode(text, add_special_tokens=False)) for text in ways]
        return [ids for ids in dict.fromkeys(every) if ids]

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text that UTF-8 can encode, without special tokens and of any
        length.
        """
        return library.encode_ids(self._backend, text, is_quick=self.is_quick)

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids as `encode_plain` does, and the end of each token in `text`, in
        characters.
        """
        encoding = library.encode(self._backend, text, is_quick=self.is_quick)
        return encoding.ids, [end for _, end in encoding.offsets]

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token writes after others: the name of a special one, its bytes
        otherwise.

        Empty for an id outside the vocabulary. Raises `InvariantError` for an invalid id.
        """
        piece = self.pieces[token_id]
        if piece is None:
            piece = self.special_names.get(token_id, "")
        return piece.encode() if isinstance(piece, str) else piece

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for bytes that are part of a character."""
        text = self.pieces.texts.get(token_id)
        return text or self.token_bytes(token_id).decode("utf-8", "replace")

    def unlike(self, other: Tokenizer) -> tuple[str, int | None, int | None] | None:
        """Return the token with the lowest id that the two tokenizers have under different ids.

        With it come its ids here and there (None: it isn't there). None if there is no difference.
        """
        here, there = self._vocabulary(), other._vocabulary()
        ids = [
            (min(one for one in pair if one is not None), token, *pair)
            for token in {**here, **there}
            if len({*(pair := (here.get(token), there.get(token)))}) > 1
        ]
        return min(ids)[1:] if ids else None

    def _vocabulary(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids outside the vocabulary, which a padded model may produce,
        add nothing.

        Raises `InvalidPromptError` for anything but a sequence of at most `MAX_IDS` ints in [0,
        2**32).
        """
        plain = check(InvalidPromptError, "ids", ids, sequence(integer(0, 2**32 - 1), MAX_IDS))
        skip = check(InvalidPromptError, "skip_special_tokens", skip_special_tokens, boolean)
        return self._backend.decode(plain, skip_special_tokens=skip)


def _why(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!r} at {error.start}: {error.reason}"
    return "the tokenizers library refuses it"
