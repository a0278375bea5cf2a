"""Text of one stream: its detokenizer and its stop strings behind one call per token.

Knows text rules alone; the scheduler decides which ids end a completion.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from copy import copy

from aioserve.errors import InvariantError
from aioserve.request import Logprobs, SamplingParams, TopLogprob
from aioserve.text.stop import StopAutomaton, StopStrings
from aioserve.text.token_bytes import Piece, PieceTable
from aioserve.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "TextAssembler"]


class TextAssembler:
    """Text of one completion, token by token; empty without a tokenizer.

    A piece of text is delivered with the token that made it final. That token completed its last
    character, and ruled out that it is part of a stop string. The results of all pushes and of
    `finish`, joined, are `tokenizer.decode` of the pushed ids, cut before the first stop string.
    The text of an id that ended the completion is left out. With `include_stop_str_in_output` that
    text is included, and the cut is after the stop string.

    A stop string ends the completion if a token after the first `min_tokens` makes its last
    character final; it may begin before. Of `params`, only these two fields and `stop` are used.

    - `shown` are special tokens whose text is delivered even so, also if they end the completion.
      A parser of its marks reads the last one too. Their text is found by `marks_in`.
    - `stops` is the automaton of `params.stop`, which assemblers share. Without it the assembler
      makes its own.

    Not thread-safe.
    """

    __slots__ = (
        "_detokenizer",
        "_finished",
        "_include",
        "_marks",
        "_num_blind",
        "_num_chars",
        "_num_given",
        "_stops",
        "_tokenizer",
        "matched_stop",
        "shown",
    )

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        shown: Mapping[int, str] | None = None,
        stops: StopAutomaton | None = None,
    ) -> None:
        if tokenizer is None and params.stop:
            raise InvariantError(f"stop strings without a tokenizer: {params.stop!r}")
        self._include = params.include_stop_str_in_output
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer)
        self._stops = None
        if params.stop:
            stops = stops or StopAutomaton(params.stop)
            self._stops = StopStrings(stops, include=self._include)
        self._num_blind = params.min_tokens
        """Tokens to come before a stop string may end the text."""
        self._finished = False
        self.shown: Mapping[int, str] = shown or {}
        self._marks: tuple[int, ...] = ()
        """Places in the whole text at which tokens among `shown` begin, without those that
        `marks_in` has reported.
        """
        self._num_chars = self._num_given = 0
        """Characters that tokens wrote, and the number of them that `marks_in` was given."""
        self.matched_stop: str | None = None
        """The stop string that ended the text, if one did."""

    def push(self, token_id: int, *, is_end: bool = False) -> tuple[str, bool]:
        """Return the text to deliver with this token, and True if a stop string ended the
        completion with it.

        Set `is_end` for an id that ends the completion, so that `finish` comes next. Raises
        `InvariantError` once the completion has ended.
        """
        if self._finished:
            raise InvariantError(f"token {token_id} after the end of its completion")
        if self._detokenizer is None:
            text = ""
        elif token_id in self.shown:
            text = self._detokenizer.flush()
            self._marks += (self._num_chars + len(text),)
            text += self.shown[token_id]
        elif is_end and not self._include:
            text = ""
        else:
            text = self._detokenizer.push(token_id)
        self._num_chars += len(text)
        if self._stops is None:
            return text, False
        text = self._stops.push(text, may_end=self._num_blind <= 0)
        self._num_blind -= 1
        self.matched_stop = self._stops.matched
        self._finished = self.matched_stop is not None
        return text, self._finished

    def finish(self) -> str:
        """End the completion; return the held tail, which belongs to its last token.

        A stop string that only the flushed tail completes still cuts it, and sets `matched_stop`.
        Empty after a stop or a second time.
        """
        if self._finished:
            return ""
        self._finished = True
        tail = "" if self._detokenizer is None else self._detokenizer.flush()
        if self._stops is None:
            return tail
        tail = self._stops.push(tail, may_end=self._num_blind < 0)
        self.matched_stop = self._stops.matched
        return tail + self._stops.flush()

    def marks_in(self, text: str) -> tuple[int, ...]:
        """Return the places in `text`, which is delivered next, at which tokens among `shown`
        begin.

        Call it with everything that `push` and `finish` return, or never.
        """
        start = self._num_given
        self._num_given += len(text)
        places = [place for place in self._marks if place < self._num_given]
        self._marks = self._marks[len(places) :]
        return tuple([place - start for place in places])

    def fork(self) -> TextAssembler:
        """Return another assembler that goes on from the same tokens, independently. O(1)."""
        other = copy(self)
        other._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        other._stops = copy(self._stops)  # its fields are strs and ints, which never change
        return other

    def with_texts(self, logprobs: Logprobs) -> Logprobs:
        """Return `logprobs` with the texts of the most likely tokens."""
        if self._tokenizer is None or not logprobs.top:
            return logprobs
        text_of = self._tokenizer.token_text
        top = [TopLogprob(one.id, one.logprob, text_of(one.id)) for one in logprobs.top]
        return Logprobs(logprobs.logprob, tuple(top))


class IncrementalDetokenizer:
    """Text of one stream's generated ids, as they come.

    For every sequence of ids, the pushes' results and the flush's, joined, equal
    `tokenizer.decode(ids)`. Each `push` returns all text that no later id can change. With
    byte-level BPE an incomplete character is held. With byte fallback a run of byte tokens is held
    until it ends: an invalid byte anywhere turns every byte of the run into U+FFFD. Not
    thread-safe: one stream, one thread at a time.
    """

    __slots__ = ("_byte_level", "_first", "_held", "_pieces", "_plain", "_strip_left", "_texts")

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces
        self._pieces: PieceTable = pieces
        self._texts: dict[int, str] = pieces.texts
        self._byte_level = pieces.byte_level
        self._held = bytearray()
        """Bytes of an incomplete character, or of a run that goes on."""
        self._first = pieces.first_differs
        self._strip_left = pieces.strip_left
        self._plain = not self._first and not self._strip_left
        """True if a whole piece is its own text: nothing is held, and nothing is to be stripped."""

    def push(self, token_id: int) -> str:
        """Return the text that became final with this id; often empty. O(1) amortised.

        Raises `InvariantError` for a negative id.
        """
        if self._plain:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        piece = self._pieces[token_id]
        return "" if piece is None else self._push_slow(token_id, piece)

    def flush(self) -> str:
        """Return the held tail, when no further id follows; incomplete characters become U+FFFD."""
        return self._strip(self._end_run())

    def fork(self) -> IncrementalDetokenizer:
        """Return another detokenizer that goes on from the same ids, independently."""
        other = copy(self)
        other._held = bytearray(self._held)
        return other

    def _push_slow(self, token_id: int, piece: Piece) -> str:
        if self._first:
            self._first = False
            piece = self._pieces.first(token_id)
        if isinstance(piece, bytes):
            held, text = self._held, ""
            held += piece
            if self._byte_level:
                # Like `codecs`' incremental decoder, which is Python too, in less time.
                text, used = codecs.utf_8_decode(held, "replace", False)
                del held[:used]
                text = self._strip(text)
            self._plain = not held and not self._strip_left
            return text
        text = self._strip(self._end_run() + (piece or ""))
        self._plain = not self._strip_left
        return text

    def _end_run(self) -> str:
        """Return the text of the held bytes, to which nothing is added any more."""
        if not self._held:
            return ""
        held = bytes(self._held)
        self._held.clear()
        try:
            return held.decode()
        except UnicodeDecodeError:
            return held.decode(errors="replace") if self._byte_level else "\ufffd" * len(held)

    def _strip(self, text: str) -> str:
        """Remove the characters that are still to be stripped at the start of the whole text."""
        if not self._strip_left or not text:
            return text
        char = self._pieces.strip_char
        kept = 0
        while kept < min(self._strip_left, len(text)) and text[kept] == char:
            kept += 1
        self._strip_left = self._strip_left - kept if kept == len(text) else 0
        return text[kept:]
