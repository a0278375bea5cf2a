"""Build the corpus of pyhelp from the installed CPython: code tokens, facts and the tokenizer.

Usage: python tools/pyhelp/corpus.py OUT_DIR
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
from facts import CANONICAL, Fact, collect_facts, sample_questions
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = (
    "{#- tool_parser: json -#}"
    "{%- if tools -%}"
    "{{ '<|im_start|>system\\nFunctions that may be called, by ' }}"
    '{{ \'[{"name": ..., "arguments": {...}}]:\' }}'
    "{%- for tool in tools -%}{{ '\\n' + (tool['function'] | tojson) }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{%- if message['tool_calls'] -%}"
    "{{ '[' }}"
    "{%- for call in message['tool_calls'] -%}"
    "{{ '{\"name\": ' + (call['function']['name'] | tojson) }}"
    "{{ ', \"arguments\": ' + (call['function']['arguments'] | tojson) + '}' }}"
    "{%- if not loop.last -%}{{ ', ' }}{%- endif -%}"
    "{%- endfor -%}"
    "{{ ']' }}"
    "{%- endif -%}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
HELD_OUT_ONE_IN = 40

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SKIPPED_PARTS = {
    *("__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "dist-packages"),
    *("test", "tests", "idle_test", "turtledemo", "encodings", "pydoc_data", "distutils"),
}
_TOP_LEVEL = re.compile(rb"^(?:(?:async )?def |class |@|import |from )", re.MULTILINE)


def library_files() -> list[Path]:
    """Return the standard library's source files, sorted, without tests and data tables."""
    root = Path(sysconfig.get_path("stdlib"))
    chosen = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        skipped = any(
            part in _SKIPPED_PARTS or part.startswith("config-") for part in relative.parts
        )
        if not skipped and not path.name.startswith("_sysconfigdata"):
            chosen.append(path)
    return chosen


def is_held_out(relative: str) -> bool:
    """Say whether a file belongs to the held-out split, from its name alone."""
    return int(hashlib.sha256(relative.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def read_documents() -> tuple[list[str], list[str]]:
    """Return the training and the held-out documents."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[str] = []
    held_out: list[str] = []
    for path in library_files():
        text = path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")
        if not text.strip() or max(map(len, text.split("\n"))) > 2000:
            continue
        relative = path.relative_to(root).as_posix()
        (held_out if is_held_out(relative) else train).append(text.strip("\n") + "\n")
    return train, held_out


def language_topics() -> list[str]:
    """Return the language reference sections that CPython ships for pydoc's help()."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return [topics[name].strip("\n") + "\n" for name in sorted(topics)]
    return []


def train_tokenizer(documents: list[str], facts: list[Fact]) -> Tokenizer:
    """Train the byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chats = [f"{CANONICAL.format(name=fact.name)}\n{fact.answer}\n" for fact in facts]
    tokenizer.train_from_iterator(documents + chats * 8, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return all tokens in one array, and the positions where top-level statements start."""
    end = token_id(tokenizer, END_OF_TEXT)
    tokens: list[int] = []
    starts: list[int] = []
    for document in documents:
        encoding = tokenizer.encode(document)
        starts_of_lines = {match.start() for match in _TOP_LEVEL.finditer(document.encode())}
        if document.isascii():
            starts += [
                len(tokens) + index
                for index, (begin, _) in enumerate(encoding.offsets)
                if begin in starts_of_lines
            ]
        starts.append(len(tokens))
        tokens += [*encoding.ids, end]
    return np.asarray(tokens, dtype=np.uint16), np.asarray(sorted(set(starts)), dtype=np.int64)


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build(out: Path) -> None:
    """Write the whole corpus to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    facts = collect_facts()
    train, held_out = read_documents()
    train += language_topics()
    tokenizer = train_tokenizer(train, facts)
    write_tokenizer(tokenizer, out)
    tokens, starts = encode_documents(tokenizer, train)
    held_out_tokens, _ = encode_documents(tokenizer, held_out)
    np.savez(out / "corpus.npz", tokens=tokens, starts=starts, held_out=held_out_tokens)
    known = [[fact.name, fact.answer] for fact in facts]
    summary = {
        "python": sys.version.split()[0],
        "train_documents": len(train),
        "train_bytes": sum(len(text.encode()) for text in train),
        "train_tokens": len(tokens),
        "held_out_documents": len(held_out),
        "held_out_bytes": sum(len(text.encode()) for text in held_out),
        "held_out_tokens": len(held_out_tokens),
        "facts": len(facts),
    }
    (out / "facts.json").write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")
    questions = json.dumps(sample_questions(facts), indent=0) + "\n"
    (out / "questions.json").write_text(questions, encoding="utf-8")
    (out / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=2))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder to write the corpus to")
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
