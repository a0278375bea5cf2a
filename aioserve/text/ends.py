"""Tokens that end an answer: those that files name, and those that are known by name.

A model names its ends in up to four places, which contradict each other. For example, config.json
says `<|endoftext|>`, tokenizer_config.json `<|im_end|>`, generation_config.json both or neither,
and a GGUF file one of them. All that any place names end an answer. So does a token that has no
other use in any model, whatever kind the files give it. Knows no templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from aioserve.json_file import read_json_object

__all__ = ["end_ids", "mark_ends", "named_ends", "names_in"]

MAX_FILE_BYTES = 1 << 22
"""Largest size of a file with names of tokens, in bytes."""

IdOf = Callable[[str], int | None]
"""Returns the id of the token of that name; None if the vocabulary doesn't have it."""

NAMES = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>",
        "<|return|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<|end_of_turn|>",
        "<|eot|>", "<eos>", "[EOS]", "[EOT]", "<EOT>", "_<EOT>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "[|endofturn|]",
    }
)  # fmt: skip
"""Names that end an answer in every vocabulary that has them."""
_RETURN, _CALL, _OF_MESSAGE = "<|return|>", "<|call|>", "<|end|>"
"""Marks of GPT-OSS: a vocabulary with the first two is its. A call ends an answer; the third ends
one message of several.
"""
_STROKE, _BEGIN = "</s>", "<s>"
"""Marks of a text's end and beginning. The first is an end only if texts begin with the second. In
Gemma's vocabulary both are HTML.
"""


def names_in(directory: Path, role: str) -> list[str]:
    """Return the names that tokenizer_config.json and special_tokens_map.json give the token of a
    role.

    A role is "eos_token", say. Raises `ModelError` for a file that can't be read.
    """
    names: list[str] = []
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / file
        value: Any = read_json_object(path, MAX_FILE_BYTES).get(role) if path.is_file() else None
        name = value.get("content") if isinstance(value, dict) else value
        if isinstance(name, str):
            names.append(name)
    return names


def named_ends(id_of: IdOf, begin_ids: Iterable[int | None] = ()) -> dict[str, int]:
    """Return the ids of the tokens that end an answer by their names. Texts begin with
    `begin_ids`.
    """
    names = set(NAMES)
    if _is_harmony(id_of):
        names = names - {_OF_MESSAGE} | {_CALL}
    begin = id_of(_BEGIN)
    if begin is not None and begin in begin_ids:
        names.add(_STROKE)
    found = {name: id_of(name) for name in sorted(names)}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def end_ids(
    said: Iterable[int | None], id_of: IdOf, begin_ids: Iterable[int | None] = ()
) -> tuple[int, ...]:
    """Return all ids that end an answer: those from files, then those of known names.

    Each group keeps its order. The end of one of several messages, as GPT-OSS writes them, ends no
    answer, whatever a file says.
    """
    of_message = id_of(_OF_MESSAGE) if _is_harmony(id_of) else None
    every = [*said, *sorted(named_ends(id_of, begin_ids).values())]
    return tuple(dict.fromkeys([one for one in every if one is not None and one != of_message]))


def mark_ends(backend: tokenizers.Tokenizer) -> None:
    """Mark the known end tokens of `backend` as special.

    So they are found in templates, and no text shows them.
    """
    added = backend.get_added_tokens_decoder()
    for name, token_id in named_ends(backend.token_to_id).items():
        token = added.get(token_id)
        if token is None or not token.special:
            backend.add_special_tokens([_special(name, token)])


def _special(name: str, token: AddedToken | None) -> AddedToken:
    if token is None:
        return AddedToken(name, normalized=False, special=True)
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _is_harmony(id_of: IdOf) -> bool:
    return id_of(_RETURN) is not None and id_of(_CALL) is not None
