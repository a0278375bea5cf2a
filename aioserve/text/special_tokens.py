"""Protection of message text, and of what comes with it, from becoming special tokens.

A chat template writes turns and messages into one text. A tokenizer can't tell the turn mark that
the template wrote from the same characters typed by a user. So, before rendering, some characters
of the messages are escaped. The character that completes a special token's name is replaced by a
stand-in, which none of the texts has. A special token in the rendered text is then the template's.
These tokens get secret names, and the stand-ins are replaced again. The text is encoded by a
tokenizer that knows the special tokens only by their secret names. It shares the model, the
normalizer and the pre-tokenizer, so ordinary text gets its usual ids.

A template may take the text apart and put it together differently. So each time the special tokens
of the prompt are compared with those of the same messages with meaningless contents. A prompt whose
tokens differ is refused.

Special tokens are those with that flag, which `decode` leaves out: no completion prints them, so no
message needs them. Names like `<|...|>` count too, with full-width bars as well: some models
(DeepSeek's, Cohere's) don't flag their turn marks. Other added tokens (`<think>`, say) are
recognised in messages. The unknown token marks nothing: text that the model can't spell may always
become it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, models

from aioserve.errors import InvalidPromptError, UnsupportedModelError
from aioserve.text import library
from aioserve.text.conversation import Conversation
from aioserve.text.escape_special import NOTHING, NOTHINGS, Escapes

__all__ = ["SpecialSpan", "SpecialTokens"]

WINDOW_CHARS = 1 << 16
"""Characters of a piece in which text is searched: other threads run between two pieces."""
MAX_GAPS = 100_000
MAX_NAME_CHARS = 128

_LOOKS_SPECIAL = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)


class SpecialSpan(NamedTuple):
    """A special token in a text, from character `start` to `end`."""

    start: int
    end: int
    token_id: int


class SpecialTokens:
    """Special tokens of one tokenizer: finds them in text, and encodes text without them.

    Nothing may change `backend` afterwards; `source` names it in errors; `is_quick` is that of the
    tokenizer. Thread-safe. Raises `UnsupportedModelError` for special tokens with absurd names or
    ids.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, source: str, *, is_quick: bool = True
    ) -> None:
        added: dict[int, AddedToken] = {
            token_id: token
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.content
        }
        specials = {token_id: token for token_id, token in added.items() if _is_special(token)}
        names = [token.content for token in specials.values()]
        if (longest := max(names, key=len, default="")) and len(longest) > MAX_NAME_CHARS:
            raise UnsupportedModelError(
                f"{source}: a special token must have at most {MAX_NAME_CHARS} characters, "
                f"got {len(longest)}: {longest[:40]!r}..."
            )
        self._backend = backend
        self._source = source
        self._is_quick = is_quick
        self._names = dict(zip(specials, names, strict=True))
        self._pattern = re.compile(_any_of(names)) if names else None
        self._longest = len(longest)
        self._starts = {name[:cut] for name in names for cut in range(1, len(name))}
        self._ends = {name[cut:] for name in names for cut in range(1, len(name))}
        self._first_chars = _one_of(name[0] for name in names)
        self._last_chars = _one_of(name[-1] for name in names)
        self._any_normalized = any(token.normalized for token in specials.values())
        self._any_single_word = any(token.single_word for token in specials.values())
        self._marks = {char for name in names for char in name if not _is_plain(char)}
        """Characters of names that no word has."""
        self._keeps_space = not any(name != name.strip() for name in names)
        self._finder, self._found = _finder(backend, added)
        self._unknown_id = _unknown_id(backend)
        self._secret = secrets.token_hex(16)
        self._spelled = self._spelled_by_the_model()
        self._inner, self._ids = self._with_secret_names(added)

    @property
    def is_needed(self) -> bool:
        """True if the tokenizer has any special token."""
        return bool(self._names)

    # -- before rendering

    def escaped(
        self, conversation: Conversation, *, apart_from: str
    ) -> tuple[Conversation, Escapes]:
        """Escape what could complete a special token; return the conversation and the escapes.

        No stand-in occurs in the conversation or in `apart_from`. Raises `InvalidPromptError` if no
        stand-in is free.
        """
        roles = [message["role"] for message in conversation.messages]
        escapes = Escapes({apart_from, *roles, *conversation.texts()})
        return conversation.mapped(
            lambda text: self._escaped_content(text, escapes),
            role=lambda role: self._escaped_role(role, escapes),
        ), escapes

    def meaningless(self, conversation: Conversation) -> Conversation:
        """Return the conversation with texts that are part of no special token.

        Empty texts stay empty, white space around a text stays, an id keeps its length, and keys
        differ.
        """
        return conversation.mapped(
            self._meaningless,
            identifier=lambda text: NOTHING * len(text),
            key=lambda _, index: "".join([NOTHINGS[int(bit)] for bit in f"{index:b}"]),
        )

    def unmarked(self, conversation: Conversation) -> Conversation:
        """Return the conversation with only the words and white space of its texts.

        A special token in its prompt then has its marks from elsewhere.
        """
        table = {ord(mark): NOTHING for mark in self._marks if not mark.isspace()}
        return conversation.mapped(lambda text: text.translate(table))

    def may_spell(self, token_ids: Iterable[int], conversation: Conversation) -> bool:
        """Return true if a text may have the words of one of these tokens, which stand between its
        marks.

        A token without marks is nothing but words.
        """
        names = [self._names[token_id] for token_id in token_ids]
        if self._any_normalized or any(self._marks.isdisjoint(name) for name in names):
            return True
        words = {_longest_word(name).casefold() for name in names} - {""}
        texts = [text.casefold() for text in conversation.texts()]
        return any(word in text for text in texts for word in words)

    def _meaningless(self, content: str) -> str:
        text = content.strip()
        if not text:
            return content
        if not self._keeps_space:
            return NOTHING
        start = len(content) - len(content.lstrip())
        nothing = NOTHING
        if self._any_single_word:
            # Beside a letter, such a token isn't recognised.
            nothing = f"{text[0]}{NOTHING}{text[-1]}"
        return content[:start] + nothing + content[start + len(text) :]

    def _escaped_role(self, role: str, escapes: Escapes) -> str:
        """Escape marks in a role. Templates make special tokens of roles by design: `"<|" ~ role ~
        "|>"`.

        A name has letters and digits. A mark in it can only end one token and start another.
        """
        at = [match.start() for match in self._occurrences(role)]
        at += [
            index
            for index, char in enumerate(role)
            if char in self._marks
            or (self._any_normalized and not (char.isascii() and _is_plain(char)))
        ]
        return escapes.escape(role, at)

    def _escaped_content(self, content: str, escapes: Escapes) -> str:
        at = [match.start() for match in self._occurrences(content)]
        if self._any_normalized:
            at += [
                span.start + len(text) - len(text.lstrip())
                for span in self.find(content)
                if not (text := content[span.start : span.end]).isspace()
            ]
        at += self._open_ends(content)
        return escapes.escape(content, at)

    def _occurrences(self, text: str) -> Iterator[re.Match[str]]:
        """Yield occurrences of names of special tokens, overlapping ones too."""
        if self._pattern is None:
            return
        for window in range(0, len(text), WINDOW_CHARS):
            start, stop = window, window + WINDOW_CHARS
            while match := self._pattern.search(text, start, stop + self._longest - 1):
                if match.start() >= stop:
                    break
                yield match
                start = match.start() + 1

    def _open_ends(self, content: str) -> list[int]:
        """Return places at which a content ends with the start of a name, or starts with the end of
        one.

        White space around it is ignored: the text beside it may be the rest.
        """
        first, last = len(content) - len(content.lstrip()), len(content.rstrip())
        at = []
        for end in {len(content), last}:
            tail = content[max(end - self._longest, 0) : end]
            for match in self._first_chars.finditer(tail):
                if tail[match.start() :] in self._starts:
                    at.append(end - len(tail) + match.start())
        for start in {0, first}:
            head = content[start : start + self._longest]
            for match in self._last_chars.finditer(head):
                if head[: match.end()] in self._ends:
                    at.append(start + match.start())
        return at

    # -- after rendering

    def find(self, text: str, escapes: Escapes | None = None) -> list[SpecialSpan]:
        """Return the special tokens that the tokenizer would recognise in `text`, in order.

        Tokens with a stand-in are left out.
        """
        encoding = library.encode(self._finder, text, is_quick=self._is_quick)
        spans = [
            SpecialSpan(*offsets, self._found[token_id])
            for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self._found
        ]
        if escapes is None:
            return spans
        return [span for span in spans if not escapes.occur_in(text[span.start : span.end])]

    def encode(
        self,
        text: str,
        escapes: Escapes,
        spans: Sequence[SpecialSpan],
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids of `text`, in which exactly `spans` are special tokens.

        Raises `InvalidPromptError` if the model spells a special token even so, and
        `PromptTooLongError` for more than `max_tokens`.
        """
        if escapes.is_empty and not self._spelled:
            ids = library.encode_ids(
                self._backend, text, max_tokens=max_tokens, is_quick=self._is_quick
            )
        else:
            pieces, done = [], 0
            for span in spans:
                start, end = self._core(text, span)
                pieces += (text[done:start], self._secret_name(span.token_id))
                done = end
            named = escapes.unescape("".join([*pieces, text[done:]]))
            known = self._ids
            found = library.encode_ids(
                self._inner, named, max_tokens=max_tokens, is_quick=self._is_quick
            )
            ids = [known.get(new, new) for new in found]
        marks = self._names.keys() - {self._unknown_id}
        if [token_id for token_id in ids if token_id in marks] != [
            span.token_id for span in spans if span.token_id in marks
        ]:
            raise InvalidPromptError(
                "messages must not become special tokens, but the model's vocabulary makes one of "
                "their text; special_tokens_in_messages=True allows it"
            )
        return ids

    def _core(self, text: str, span: SpecialSpan) -> tuple[int, int]:
        """Return start and end of the span without the white space that the token takes with it."""
        found, name = text[span.start : span.end], self._names[span.token_id]
        if (index := found.find(name)) >= 0:
            return span.start + index, span.start + index + len(name)
        return span.end - len(found.lstrip()), span.start + len(found.rstrip())

    # -- the tokenizer of secret names

    def _secret_name(self, token_id: int) -> str:
        # It starts and ends like the name, so text beside it has the same neighbours. It can't be
        # part of a longer token's secret name: each has its number.
        name = self._names[token_id]
        return f"{name}{self._secret}-{token_id}-{name}"

    def _spelled_by_the_model(self) -> set[str]:
        """Return names of special tokens that the model also has as words, and makes of their
        text.
        """
        model, plain = self._backend.model, self._over(self._backend.model)
        return {
            name
            for token_id, name in self._names.items()
            if token_id != self._unknown_id and model.id_to_token(token_id) == name
            # Only encoding the text shows whether merges lead there. One character is spelled by
            # itself, or stands for a byte.
            if not isinstance(model, models.BPE)
            or (len(name) > 1 and token_id in plain.encode(name, add_special_tokens=False).ids)
        }

    def _with_secret_names(
        self, added: Mapping[int, AddedToken]
    ) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Return a tokenizer that knows special tokens only by secret names, and the true ids of
        its added tokens.
        """
        model = self._backend.model
        if self._spelled:
            model = _renamed(model, {name: f"{name}{self._secret}" for name in self._spelled})
        inner = self._over(model)
        tokens = {
            self._secret_name(token_id) if token_id in self._names else token.content: token_id
            for token_id, token in added.items()
        }
        # New ids are counted on from the size of the vocabulary. If its ids have gaps, one of these
        # may be taken.
        start = size = inner.get_vocab_size()
        while taken := [
            token_id
            for token_id in range(start, start + len(tokens))
            if model.id_to_token(token_id) is not None
        ]:
            start = taken[-1] + 1
            if start - size > MAX_GAPS:
                raise UnsupportedModelError(
                    f"{self._source}: token ids must have at most {MAX_GAPS} gaps, "
                    f"got one at {start}"
                )
        inner.add_tokens([f"{self._secret}{number}" for number in range(start - size)])
        inner.add_tokens([_copy(added[true], content) for content, true in tokens.items()])
        ids = {inner.token_to_id(content): true for content, true in tokens.items()}
        return inner, {new: true for new, true in ids.items() if new is not None}

    def _over(self, model: models.Model) -> tokenizers.Tokenizer:
        plain = tokenizers.Tokenizer(model)
        plain.normalizer = self._backend.normalizer
        plain.pre_tokenizer = self._backend.pre_tokenizer
        return plain


def _is_special(token: AddedToken) -> bool:
    return token.special or _LOOKS_SPECIAL.fullmatch(token.content) is not None


def _is_plain(char: str) -> bool:
    """True for a character of words, which can't be part of a mark."""
    return char.isalnum() or char in "_- "


def _longest_word(name: str) -> str:
    words = "".join([char if _is_plain(char) else "\n" for char in name])
    return max(words.split("\n"), key=len)


def _any_of(names: Iterable[str]) -> str:
    """Return a pattern that matches the first of `names`, looking at each character once."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree)


def _one_of(chars: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(set(chars)))) or r"(?!)")


def _pattern(node: dict[str, Any]) -> str:
    """Return the pattern of a tree of characters. Behind the end of a name, nothing more is
    compared.
    """
    if not node or "" in node:
        return ""
    branches = []
    for char, below in node.items():
        prefix = re.escape(char)
        # A chain of single characters needs no nesting.
        while len(below) == 1 and "" not in below:
            ((char, below),) = below.items()
            prefix += re.escape(char)
        branches.append(prefix + _pattern(below))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _copy(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _finder(
    backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """Return a tokenizer that only finds special tokens, as `backend` would, and their true ids."""
    other = "\0text\0"
    finder = tokenizers.Tokenizer(models.WordLevel({other: 0}, unk_token=other))
    if any(token.normalized for token in added.values()):
        finder.normalizer = backend.normalizer
    names = [token for token in added.values() if _is_special(token)]
    if any(token.lstrip or token.rstrip for token in names):
        beside = list(added.values())
    else:
        # Other tokens, such as runs of spaces, don't affect special tokens, and a text has many.
        chars = {char for token in names for char in token.content}
        beside = [
            token
            for token in added.values()
            if _is_special(token)
            or (token.normalized and backend.normalizer is not None)
            or not chars.isdisjoint(token.content)
        ]
    finder.add_tokens([_copy(token, token.content) for token in beside])
    return finder, {
        new: token_id
        for token_id, token in added.items()
        if _is_special(token) and (new := finder.token_to_id(token.content)) is not None
    }


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return the id of the token that the model makes of text that it can't spell."""
    model: Any = backend.model
    if isinstance(model, models.Unigram):
        unknown = re.search(rb'"unk_id":(\d+)', model.__getstate__()[:200])
        return int(unknown[1]) if unknown else None
    return None if model.unk_token is None else backend.token_to_id(model.unk_token)


def _renamed(model: Any, names: Mapping[str, str]) -> models.Model:
    """Return a copy of a model in which words have other names, and no merge leads to them."""
    state = json.loads(model.__getstate__())
    vocab = state["vocab"]
    if isinstance(vocab, dict):
        state["vocab"] = {names.get(name, name): token_id for name, token_id in vocab.items()}
    else:
        state["vocab"] = [[names.get(name, name), score] for name, score in vocab]
    if "merges" in state:
        state["merges"] = [
            merge
            for merge in state["merges"]
            if not names.keys() & {merge[0], merge[1], merge[0] + merge[1]}
        ]
    file = {"version": "1.0", "added_tokens": [], "model": state}
    return tokenizers.Tokenizer.from_str(json.dumps(file)).model
