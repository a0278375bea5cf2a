"""GGUF metadata for a tokenizer.json: the reverse of `tokenizer`.

It writes byte-level BPE with cuts that have a name in `pre_tokenizers`, and SentencePiece's BPE, by
`pieces`. The result is read again by `tokenizer`, and a vocabulary that would come out different is
refused. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.json_file import read_file
from aioserve.models.config import DecoderConfig
from aioserve.models.gguf.pieces import are_pieces, pairs_of, pieces_of, same_merges
from aioserve.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from aioserve.models.gguf.settings import WRITTEN
from aioserve.models.gguf.tokenizer import GGUFVocabulary, TokenKind
from aioserve.text.chat_template import ChatTemplate
from aioserve.text.ends import named_ends
from aioserve.text.template_files import TOOL_USE
from aioserve.text.tokenizer import Tokenizer
from aioserve.text.tokenizer_file import MAX_FILE_BYTES, parse_tokenizer

__all__ = ["vocabulary_of"]

_SOURCE = "the GGUF file to be written"
_MARKS_OF_PHI3 = frozenset(("<unk>", "<s>", "</s>", "<|endoftext|>"))
"""Tokens that llama.cpp looks for in a file named Phi-3.

There, it assumes that marks swallow the white space behind them, except some of these."""
_SAMPLE = (
    "It's 10,000 naïve CAFÉS\n\n\tdef f(x):  # we'll see; 世界 😀 e\u0301\r\n"
    "   return {'a': [1.5e-3]}"
)
"""Text that different rules cut differently."""


def vocabulary_of(
    directory: Path, config: DecoderConfig, tokenizer: Tokenizer, template: ChatTemplate | None
) -> dict[str, Any]:
    """Make metadata for the tokenizer and the chat template of the model in `directory`.

    Raises `ConfigError` for a tokenizer that a file can't describe.
    """
    # `tokenizer` was read from these bytes, so that they are valid.
    said = msgspec.json.decode(read_file(directory / "tokenizer.json", MAX_FILE_BYTES))
    model = said.get("model") or {}
    if model.get("type") != "BPE" or not isinstance(model.get("merges"), list):
        _refuse("be BPE, byte-level or SentencePiece's")
    tokens, kinds = _tokens(said, model, config.vocab_size)
    how = pieces_of if are_pieces(said, model) else _byte_level
    metadata = how(said, model, tokens, kinds) | _frame(tokenizer, config)
    if config.architecture == "Phi3ForCausalLM" and set(tokens) >= _MARKS_OF_PHI3:
        metadata["general.name"] = "Phi-3"
    for name, token_id in zip(("eos", "eot", "eom"), _ends(config, tokenizer), strict=False):
        metadata[f"tokenizer.ggml.{name}_token_id"] = token_id
    if template is not None:
        metadata["tokenizer.chat_template"] = template.source
        if template.tool_use is not None:
            metadata["tokenizer.chat_templates"] = [TOOL_USE]
            metadata[f"tokenizer.chat_template.{TOOL_USE}"] = template.tool_use.source
    family = WRITTEN[config.architecture]
    _check(metadata | {"general.architecture": family}, said, config, tokenizer, template)
    return metadata


def _byte_level(
    said: Mapping[str, Any], model: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre(said, model),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
        ],
    }


def _tokens(
    said: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Return tokens by id, and their kinds, padded to the rows of the embedding."""
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [int(TokenKind.UNUSED)] * vocab_size
    added = {one["content"]: one for one in said.get("added_tokens") or ()}
    ids = model["vocab"] | {content: one["id"] for content, one in added.items()}
    for token, token_id in ids.items():
        if token_id >= vocab_size:
            _refuse(f"have ids below vocab_size {vocab_size}, and {shown(token)} is {token_id}")
        tokens[token_id] = token
        one = added.get(token)
        if one is None:
            kinds[token_id] = TokenKind.NORMAL
            continue
        kinds[token_id] = TokenKind.CONTROL if one.get("special") else TokenKind.USER_DEFINED
    return tokens, kinds


def _pre(said: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Find the name of the rules that cut text. Raises `ConfigError` for unknown rules."""
    found = (
        _parts(said.get("pre_tokenizer")),
        said.get("normalizer") or None,
        bool(model.get("ignore_merges")),
    )
    by_bytes = [part.get("type") for part in found[0]] == ["ByteLevel"]
    if by_bytes and not model["merges"] and found[1:] == (None, False):
        return "gpt-2"  # without merges, each byte is a token, and cuts don't matter
    known = {
        name: (
            _parts(rules.pre_tokenizer()),
            {"type": "NFC"} if rules.composes else None,
            rules.ignore_merges,
        )
        for name, rules in PRE_TOKENIZERS.items()
    }
    if (name := next((name for name, rules in known.items() if rules == found), None)) is not None:
        return name
    return _refuse(f"cut text as one of {', '.join(PRE_TOKENIZERS)} does")


def _parts(pre_tokenizer: Any) -> list[Any]:
    """Steps of a pre-tokenizer, in order, without the setting that changes no token."""
    if not isinstance(pre_tokenizer, dict):
        return []
    if pre_tokenizer.get("type") == "Sequence":
        return [part for one in pre_tokenizer["pretokenizers"] for part in _parts(one)]
    return [{key: v for key, v in pre_tokenizer.items() if key != "trim_offsets"}]


def _frame(tokenizer: Tokenizer, config: DecoderConfig) -> dict[str, Any]:
    """Make the metadata for the tokens before and behind a text."""
    framed = tokenizer.encode("a")
    num_before, num_behind = tokenizer.frame
    before, behind = framed[:num_before], framed[len(framed) - num_behind :]
    if len(before) > 1 or len(behind) > 1 or (behind and behind[0] not in config.eos_token_ids[:1]):
        _refuse(f"put at most BOS and EOS around a text, and puts {before} and {behind}")
    said: dict[str, Any] = {
        "tokenizer.ggml.add_bos_token": bool(before),
        "tokenizer.ggml.add_eos_token": bool(behind),
    }
    bos = before[0] if before else config.bos_token_id
    return said if bos is None else said | {"tokenizer.ggml.bos_token_id": bos}


def _ends(config: DecoderConfig, tokenizer: Tokenizer) -> list[int]:
    """Ids of end tokens: the first one, then those that readers don't know by name."""
    known = {*named_ends(tokenizer.id_of, (config.bos_token_id,)).values()}
    return [*config.eos_token_ids[:1], *sorted(config.eos_token_ids[1:], key=known.__contains__)]


def _check(
    metadata: Mapping[str, Any],
    said: Mapping[str, Any],
    config: DecoderConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> None:
    """Raise `ConfigError` unless the file's tokenizer equals the model's."""
    vocabulary = GGUFVocabulary(metadata, _SOURCE)
    found = vocabulary.tokenizer_json()
    _check_rules(msgspec.json.decode(found), said)
    backend, size = parse_tokenizer(found, _SOURCE)
    again = Tokenizer(backend, source=_SOURCE, vocab_size=size)
    for token_id in range(max(size, tokenizer.vocab_size)):
        if again.token_bytes(token_id) != tokenizer.token_bytes(token_id):
            _refuse(f"be one that a GGUF file can tell, and its token {token_id} would be another")
    for text in (_SAMPLE, "" if template is None else template.source):
        ids = tokenizer.encode(text)
        if again.encode(text) != ids or again.decode(ids) != tokenizer.decode(ids):
            _refuse("be one that a GGUF file can tell, and would cut text in another way")
    if missing := set(config.eos_token_ids) - set(vocabulary.eos_token_ids):
        _refuse(f"end completions at three tokens at most, and {sorted(missing)} would be left out")


def _check_rules(found: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless tokens are made, and marks found, by the same rules."""
    pieces = are_pieces(said, said["model"])
    # `normalized` matters only if a normalizer changes the text in which marks are searched.
    names = ("lstrip", "rstrip", "single_word", *(("normalized",) if pieces else ()))
    rules = {one["content"]: one for one in found["added_tokens"]}
    for one in said.get("added_tokens") or ():
        other = rules.get(one["content"], {})
        if any(bool(one.get(name)) != bool(other.get(name)) for name in names):
            _refuse(
                f"take tokens wherever they stand in text, and {shown(one['content'])} has rules"
            )
    if not pieces:
        return
    for name in ("byte_fallback", "fuse_unk"):
        if bool(said["model"].get(name)) != found["model"][name]:
            _refuse(f"have {name} {str(found['model'][name]).lower()}")
    if not same_merges(pairs_of(said["model"]), found["model"]["merges"]):
        _refuse("make tokens in an order that scores can tell")


def _refuse(wanted: str) -> NoReturn:
    raise ConfigError(f"model's tokenizer must {wanted}", argument="model")
