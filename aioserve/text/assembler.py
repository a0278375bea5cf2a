"""Text of one stream: its detokenizer, and with stop strings behind one call per token.

Knows text rules alone; which ids end a completion is the scheduler's business.
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

    A piece of text is delivered with the token that made it final: with which its last
    character was completed, and with which it could no longer be part of a stop string. The
    results of all pushes and of `finish`, joined, are `tokenizer.decode` of the pushed ids, but for
    an id that ended the completion, cut before the first stop string. With
    `include_stop_str_in_output` they have the text of that id, and are cut behind the stop string.
    A stop string ends the completion where a token after the first `min_tokens` makes its last
    character final; it may begin before. Of `params` it uses these two and `stop`.

    `shown` are special tokens that have a text all the same, also where they end the completion: a
    parser of its marks reads the last one too. `marks_in` says which text is theirs. `stops` is the
    automaton of `params.stop`, which assemblers share; without one the assembler makes its own. Not
    thread-safe.
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
        """Places in the whole text where tokens among `shown` begin that `marks_in` hasn't told."""
        self._num_chars = self._num_given = 0
        """Characters that tokens wrote, and how many of them `marks_in` was told of."""
        self.matched_stop: str | None = None
        """The stop string that ended the text, if one did."""

    def push(self, token_id: int, *, is_end: bool = False) -> tuple[str, bool]:
        """Text to deliver with this token, and whether a stop string ended the completion with it.

        `is_end`: it is an id that ends the completion, so that `finish` comes next. Raises
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

        A stop string that only the flushed tail completes still cuts it (`matched_stop` says so).
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
        """Places in `text`, which is delivered next, where tokens among `shown` begin. It is called
        with all that `push` and `finish` return, or never."""
        start = self._num_given
        self._num_given += len(text)
        places = [place for place in self._marks if place < self._num_given]
        self._marks = self._marks[len(places) :]
        return tuple([place - start for place in places])

    def fork(self) -> TextAssembler:
        """Return another that goes on from the same tokens, by itself. O(1)."""
        other = copy(self)
        other._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        other._stops = copy(self._stops)  # Of texts and numbers, which nobody changes.
        return other

    def with_texts(self, logprobs: Logprobs) -> Logprobs:
        """Return `logprobs` with the texts of the most likely tokens."""
        if self._tokenizer is None or not logprobs.top:
            return logprobs
        text_of = self._tokenizer.token_text
        top = [TopLogprob(one.id, one.logprob, text_of(one.id)) for one in logprobs.top]
        return Logprobs(logprobs.logprob, tuple(top))


class IncrementalDetokenizer:
    """Turns one stream's generated ids into text as they come.

    For every sequence of ids, the pushes' results and the flush's, joined, equal
    `tokenizer.decode(ids)`. `push` gives out all text that no later id can change: with
    byte-level BPE an incomplete character is held, with byte fallback a run of byte tokens
    until it ends (an invalid byte anywhere turns the run's every byte into U+FFFD). Not
    thread-safe: one stream, one thread at a time.
    """

    __slots__ = ("_byte_level", "_first", "_held", "_pieces", "_plain", "_strip_left", "_texts")

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces
        self._pieces: PieceTable = pieces
        self._texts: dict[int, str] = pieces.texts
        self._byte_level = pieces.byte_level
        self._held = bytearray()
        """Bytes of a character that isn't complete, or of a run that goes on."""
        self._first = pieces.first_differs
        self._strip_left = pieces.strip_left
        self._plain = not self._first and not self._strip_left
        """Whether a whole piece is its own text: nothing is held, and nothing is to be left out."""

    def push(self, token_id: int) -> str:
        """Text that became final with this id; often empty. O(1) amortised.

        Raises `InvariantError` for a negative id.
        """
        if self._plain:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        piece = self._pieces[token_id]
        return "" if piece is None else self._push_slow(token_id, piece)

    def flush(self) -> str:
        """The held tail, when no further id follows; incomplete characters become U+FFFD."""
        return self._strip(self._end_run())

    def fork(self) -> IncrementalDetokenizer:
        """Return another that goes on from the same ids, by itself."""
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
                # What `codecs`' incremental decoder does, in less time: that is Python too.
                text, used = codecs.utf_8_decode(held, "replace", False)
                del held[:used]
                text = self._strip(text)
            self._plain = not held and not self._strip_left
            return text
        text = self._strip(self._end_run() + (piece or ""))
        self._plain = not self._strip_left
        return text

    def _end_run(self) -> str:
        """Text of what is held, to which nothing is added any more."""
        if not self._held:
            return ""
        held = bytes(self._held)
        self._held.clear()
        try:
            return held.decode()
        except UnicodeDecodeError:
            return held.decode(errors="replace") if self._byte_level else "\ufffd" * len(held)

    def _strip(self, text: str) -> str:
        """Remove what is left to remove at the start of the whole text."""
        if not self._strip_left or not text:
            return text
        char = self._pieces.strip_char
        kept = 0
        while kept < min(self._strip_left, len(text)) and text[kept] == char:
            kept += 1
        self._strip_left = self._strip_left - kept if kept == len(text) else 0
        return text[kept:]
