"""Small tokenizers of every kind whose text can be streamed, trained on the spot."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from aioserve.text.tokenizer import Tokenizer

__all__ = ["CORPUS", "KINDS", "byte_level_backend", "save", "tokenizer_of"]

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "def add(left, right):\n    return left + right\n\n\tprint(add(1,  2))",
    "今日は天気がいいですね。 Привет, мир! 🙂🙃 naïve café",
)
_SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level_backend() -> tokenizers.Tokenizer:
    """A tokenizer like those of GPT-2, Llama 3 and Qwen, with an added token outside the byte
    alphabet."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool call>", "né"])
    return backend


def _sentencepiece(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """A SentencePiece BPE as Llama 2 (decoder with Strip) and Gemma (without) have it."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=180, special_tokens=_SPECIAL, show_progress=False)
    # What isn't trained on falls back to bytes.
    backend.train_from_iterator(CORPUS[:3], trainer)
    trained = backend.get_vocab()
    vocab = dict(sorted(trained.items(), key=lambda item: item[1]))
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [
        (token[:cut], token[cut:])
        for token in vocab
        for cut in range(1, len(token))
        if token[:cut] in trained and token[cut:] in trained and not token.startswith("<")
    ]
    backend.model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend.add_special_tokens(_SPECIAL)
    backend.add_tokens(["<tool call>"])
    backend.decoder = decoder
    return backend


def _unigram(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _word_level() -> tokenizers.Tokenizer:
    """No decoder at all: words with a space between."""
    words = sorted({word for line in CORPUS for word in line.split()})
    vocab = {word: i for i, word in enumerate([*_SPECIAL, *words])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(_SPECIAL)
    return backend


def _fallback_steps() -> list[decoders.Decoder]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


KINDS = {
    "byte-level": byte_level_backend,
    "byte-level, fused": lambda: _with_decoder(
        byte_level_backend(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    ),
    "byte fallback, stripped": lambda: _sentencepiece(
        decoders.Sequence([*_fallback_steps(), decoders.Strip(" ", 1, 0)])
    ),
    "byte fallback, stripped thrice": lambda: _sentencepiece(
        decoders.Sequence([*_fallback_steps(), decoders.Strip(" ", 3, 0)])
    ),
    "byte fallback": lambda: _sentencepiece(decoders.Sequence(_fallback_steps())),
    "byte fallback, metaspace": lambda: _sentencepiece(
        decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "metaspace": lambda: _unigram(decoders.Metaspace()),
    "metaspace, first": lambda: _unigram(decoders.Metaspace(prepend_scheme="first")),
    "metaspace, never": lambda: _unigram(decoders.Metaspace(prepend_scheme="never")),
    "words": _word_level,
}


def _with_decoder(backend: tokenizers.Tokenizer, decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    backend.decoder = decoder
    return backend


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """One tokenizer of a kind, shared by all tests."""
    return Tokenizer(KINDS[kind](), source=kind)


def save(backend: tokenizers.Tokenizer, directory: Path) -> Path:
    """Write tokenizer.json into `directory`."""
    backend.save(str(directory / "tokenizer.json"))
    return directory
