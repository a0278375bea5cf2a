"""Reader of tokenizer.json that never holds the GIL for long.

`tokenizers.Tokenizer.from_file` parses and builds in one call that keeps the GIL. For a vocabulary
of real size, that is a quarter of a second and more, in which every event loop of the process
stands still. Nearly all of a large file is the vocabulary and the merges of a BPE model. So these
two are cut out and parsed in pieces. The library reads the rest, a tokenizer with an empty model in
a few kilobytes, and is given the model. It takes that through iterators and numbers of ours, and
other threads may take the GIL while Python code runs. One call of the library is left that can't be
divided. It makes the model's tables, in about a fifth of the time.

A file of another form (another kind of model, say) is read by the library as a whole. The library
also reports the fault of a malformed one. Both ways give the same tokenizer. Knows the format of
the file, and not what tokens mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, models

from aioserve.errors import ModelError
from aioserve.isolation import shown
from aioserve.json_file import read_file

__all__ = ["MAX_FILE_BYTES", "one_past_highest_id", "parse_tokenizer", "read_tokenizer"]

MAX_FILE_BYTES = 64 << 20
"""Most bytes of a tokenizer.json; a larger one is refused unread. The largest in use have half of
that.
"""

_PIECE = 2000
"""Entries that are parsed in one call, which takes about a millisecond."""
_MAX_DEPTH = 200
"""Deepest nesting of values; deeper ones are too deep for the library as well."""
_MAX_ERROR_CHARS = 300
"""Most characters of the library's errors, which quote the file."""
_OPTIONS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
"""Fields of a BPE model beside vocabulary, merges and `dropout`."""

_WITHIN = {bytes((byte,)) for byte in range(0x80, 0xC0)}
"""Bytes of UTF-8 that no character starts with."""

_Span = tuple[int, int]


def _pattern(template: bytes) -> re.Pattern[bytes]:
    """Make a pattern from a template of JSON: `_` is space, `"` a string. It never backtracks."""
    parts = {b"_": rb"[ \t\n\r]*+", b'"': rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'}
    return re.compile(re.sub(rb'[_"]', lambda part: parts[part[0]], template), re.DOTALL)


def _entries(template: bytes) -> re.Pattern[bytes]:
    return _pattern(b"%s(?:,%s){0,%d}+" % (template, template, _PIECE - 1))


_SPACE = _pattern(b"_")
_KEY = _pattern(b'_(")_:_')
_VOCAB = _entries(b'_"_:_[0-9]++_')
_PAIRS = _entries(rb'_\[_"_,_"_\]_')
_LINES = _entries(b'_"_')
_FLAT = _pattern(rb'(?:[^][{}\x22]++|"){1,%d}+' % _PIECE)
_SCALAR = _pattern(rb'(?:"|[^][{},:\x22 \t\n\r]++)_')

_ids = msgspec.json.Decoder(dict[str, int])
_pairs = msgspec.json.Decoder(list[tuple[str, str]])
_lines = msgspec.json.Decoder(list[str])
_added = msgspec.json.Decoder(list[dict[str, Any]])


class _OtherForm(Exception):
    """The file isn't of the form that can be read in pieces. It may still be valid."""


class _EndsTheProcess(ValueError):
    """The library would end the process over this file."""


def read_tokenizer(file: Path) -> tuple[tokenizers.Tokenizer, int]:
    """Return the tokenizer in `file`, and one past its highest id.

    Raises `ModelError` naming the file if it is too large or can't be read.
    """
    return parse_tokenizer(read_file(file, MAX_FILE_BYTES), str(file))


def parse_tokenizer(data: bytes, source: str) -> tuple[tokenizers.Tokenizer, int]:
    """Do as `read_tokenizer` for a file's contents; `source` names it in errors."""
    try:
        try:
            return _read_in_pieces(data)
        except _OtherForm:
            return _read_whole(data)
    except BaseException as error:
        if not _is_of_the_library(error):
            raise
        raise ModelError(
            f"{source} can't be read as a tokenizer: {str(error)[:_MAX_ERROR_CHARS]}"
        ) from error


def one_past_highest_id(backend: tokenizers.Tokenizer) -> int:
    """Return one past the highest id, added tokens included. Reads the whole vocabulary."""
    return 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)


def _read_whole(data: bytes) -> tuple[tokenizers.Tokenizer, int]:
    text = data.decode()
    json.loads(text, object_pairs_hook=_check_object)
    backend = tokenizers.Tokenizer.from_str(text)
    return backend, one_past_highest_id(backend)


def _read_in_pieces(data: bytes) -> tuple[tokenizers.Tokenizer, int]:
    """Read `data` in pieces. Raises `_OtherForm` if only the library can tell what is in it."""
    scan = _Scan(data)
    rest = b"".join(scan.rest())
    try:
        added = _added_tokens(data[slice(*scan.added)])
        vocab, size = _vocab(data, scan.vocab)
        backend = tokenizers.Tokenizer.from_str(rest.decode())
        rest_model: Any = backend.model
        merges: Any = _Merges(data, scan.merges, rest_model.continuing_subword_prefix or "")
        options = {name: getattr(rest_model, name) for name in _OPTIONS}
        given = {name: value for name, value in options.items() if value is not None}
        # Read last, between the two halves of the call that can't be divided otherwise.
        model: Any = models.BPE(vocab, merges, **given, dropout=_Number(0))
        model.dropout = rest_model.dropout
        backend.model = model
        # Last, as in the library: tokens without an id in the vocabulary get one each.
        backend.add_tokens(added)
    # The library reports all other faults, of the whole file.
    except BaseException as error:
        if isinstance(error, _EndsTheProcess) or not _is_of_the_library(error):
            raise
        raise _OtherForm from error
    return backend, max(size, 1 + max(backend.get_added_tokens_decoder(), default=-1))


def _is_of_the_library(error: BaseException) -> bool:
    """True if the library raised it: a bare Exception for a malformed file, or a panic, which isn't
    even an Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _check_merge(right: str, prefix: str) -> None:
    """Refuse a merge that ends the process.

    The library cuts as many bytes off its right part as the prefix has. Within a character, that
    can't be caught as an error.
    """
    part, cut = right.encode(), len(prefix.encode())
    if len(part) < cut or part[cut : cut + 1] in _WITHIN:
        raise _EndsTheProcess(
            f"{shown(right)} in merges is cut by continuing_subword_prefix {shown(prefix)}"
        )


def _check_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _EndsTheProcess("a key is in an object twice")
    prefix, merges = values.get("continuing_subword_prefix"), values.get("merges")
    if prefix and isinstance(prefix, str) and isinstance(merges, list):
        for merge in merges:
            _check_merge(str((merge.split(" ") if isinstance(merge, str) else merge)[-1]), prefix)
    return values


def _added_tokens(listed: bytes) -> list[AddedToken]:
    """Return the file's added tokens in its order."""
    if not listed:
        return []
    model = '{"type": "BPE", "vocab": {}, "merges": []}'
    backend = tokenizers.Tokenizer.from_str(
        f'{{"added_tokens": {listed.decode()}, "model": {model}}}'
    )
    tokens = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    # Duplicates and empty ones have rules of their own.
    if [token.content for token in tokens] != [entry["content"] for entry in _added.decode(listed)]:
        raise _OtherForm
    return tokens


def _vocab(data: bytes, pieces: list[_Span]) -> tuple[dict[str, Any], int]:
    """Return the vocabulary, token to id, and one past the highest id."""
    vocab: dict[str, Any] = {}
    size = 0
    for start, end in pieces:
        piece = _ids.decode(b"{%s}" % data[start:end])
        size = max(size, 1 + max(piece.values()))
        vocab.update(piece)
        token, token_id = piece.popitem()
        vocab[token] = _Number(token_id)
    return vocab, size


class _Number:
    """A number that lets other threads take the GIL when it is read."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value

    def __float__(self) -> float:
        return float(self._value)


class _Merges(Sequence[tuple[str, str]]):
    """Merges, parsed as they are read, piece by piece. Their number isn't known before."""

    def __init__(self, data: bytes, pieces: list[_Span], prefix: str) -> None:
        self._data = data
        self._pieces = pieces
        self._prefix = prefix

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for start, end in self._pieces:
            merges = self._parse(b"[%s]" % self._data[start:end])
            if self._prefix:
                for _, right in merges:
                    _check_merge(right, self._prefix)
            yield from merges

    def _parse(self, piece: bytes) -> list[tuple[str, str]]:
        if _PAIRS.match(piece, 1):
            return _pairs.decode(piece)
        # Files of the other form may have a header.
        lines = [line for line in _lines.decode(piece) if not line.startswith("#version")]
        return [(left, right) for left, right in (line.split(" ") for line in lines)]

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]


class _Scan:
    """Places of the parts that are cut out of a file, each found in pieces."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._holes: list[tuple[_Span, bytes]] = []
        self.added: _Span = (0, 0)
        self.vocab: list[_Span] = []
        """Runs of entries, without brackets around them, like `merges`."""
        self.merges: list[_Span] = []
        kind = b""
        self._match(_SPACE)
        for key in self._keys():
            if key == "added_tokens":
                self.added = self._skip()
                self._holes.append((self.added, b"[]"))
            elif key != "model":
                self._skip()
                continue
            else:
                kind = self._model()
        if kind != b'"BPE"' or len(self._holes) < 2 + bool(self.added[1]):
            raise _OtherForm

    def rest(self) -> Iterator[bytes]:
        """Yield the file with empty parts in place of those cut out."""
        position = 0
        for (start, end), empty in sorted(self._holes):
            yield self._data[position:start]
            yield empty
            position = end
        yield self._data[position:]

    def _model(self) -> bytes:
        kind = b""
        for key in self._keys():
            if key == "type":
                kind = self._data[slice(*self._skip())].strip()
            elif key == "vocab":
                self.vocab = self._cut(b"{}", _VOCAB)
            elif key == "merges":
                pairs = _PAIRS.match(self._data, self._position + 1)
                self.merges = self._cut(b"[]", _PAIRS if pairs else _LINES)
            else:
                self._skip()
        return kind

    def _keys(self) -> Iterator[str]:
        """Yield the keys of the object that begins here; the caller moves past the value of
        each.
        """
        seen: set[str] = set()
        self._take(b"{")
        while True:
            try:
                key = msgspec.json.decode(self._match(_KEY)[1], type=str)
            except ValueError as error:
                raise _OtherForm from error
            if key in seen:
                raise _OtherForm
            seen.add(key)
            yield key
            if self._next() != b",":
                break
            self._take(b",")
        self._take(b"}")

    def _cut(self, brackets: bytes, entries: re.Pattern[bytes]) -> list[_Span]:
        """Cut the value that begins here out of the rest; return the runs of its entries."""
        start = self._position
        self._take(brackets[:1])
        runs: list[_Span] = []
        if self._next() != brackets[1:]:
            runs.append(self._match(entries).span())
            while self._next() == b",":
                self._take(b",")
                runs.append(self._match(entries).span())
        self._take(brackets[1:])
        self._holes.append(((start, self._position), brackets))
        return runs

    def _skip(self) -> _Span:
        """Move past the value that begins here; return its span."""
        start = self._position
        if self._next() not in (b"{", b"["):
            self._match(_SCALAR)
            return start, self._position
        depth = 0
        while depth <= _MAX_DEPTH:
            following = self._next()
            if following in (b"{", b"["):
                depth += 1
                self._position += 1
            elif following in (b"}", b"]"):
                depth -= 1
                self._take(following)
                if depth == 0:
                    return start, self._position
            else:
                self._match(_FLAT)
        raise _OtherForm

    def _next(self) -> bytes:
        return self._data[self._position : self._position + 1]

    def _take(self, expected: bytes) -> None:
        if self._next() != expected:
            raise _OtherForm
        self._position += 1
        self._match(_SPACE)

    def _match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes]:
        found = pattern.match(self._data, self._position)
        if found is None:
            raise _OtherForm
        self._position = found.end()
        return found
