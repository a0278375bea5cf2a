"""Counts how many tokens a step would bring with each drafter, on existing texts.

    python benchmarks/draft_replay.py [--agents FILE] [--tokenizer DIR] [--limit 8]
        [--drafter NAME:OPTION=VALUE,.. ...] [--json FILE]

No model runs: answers are the texts, and a draft token is right if it is the next token there.
Greedy decoding by the model that wrote them would accept the same.

    edits       the prompt is a file of the standard library, the answer the same file with a name
                in it replaced
    goes on     the prompt is the first half of such a file, the answer the second
    agents      steps of the agent sessions in FILE (`agent_text_sessions.jsonl.gz`), each with all
                of its session before it as its prompt

All texts are in tokens of the embedded model, or of the tokenizer in a directory. Answers come one
after the other, and the answers of one kind share a namespace. Printed are tokens per step, tokens
drafted per step, and the share of these that were right.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from drafters import DRAFTERS, embedded_tokenizer

from aioserve.drafting.drafter import DraftedSequence, Drafter
from aioserve.text.tokenizer import Tokenizer

MAX_PROMPT_TOKENS = 32_768
MAX_ANSWER_TOKENS = 4_096


@dataclass(frozen=True)
class Answered:
    prompt: str
    answer: str


@dataclass(frozen=True)
class Row:
    workload: str
    drafter: str
    answers: int
    tokens: int
    steps: int
    drafted: int
    accepted: int

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


def library_files(count: int) -> list[str]:
    """Return files of the standard library of moderate size, evenly spread."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    fitting = [text for text in texts if 2_000 <= len(text) <= 16_000]
    return fitting[:: max(1, len(fitting) // count)][:count]


def edits(count: int) -> Iterator[Answered]:
    for text in library_files(count):
        names = Counter(re.findall(r"\b[a-z_]{6,}\b", text))
        name = max(names, key=lambda name: (names[name], name))
        prompt = f"Rename {name} to renamed_one.\n\n{text}"
        yield Answered(prompt, text.replace(name, "renamed_one"))


def goes_on(count: int) -> Iterator[Answered]:
    for text in library_files(count):
        yield Answered(text[: len(text) // 2], text[len(text) // 2 :])


def agents(path: Path) -> Iterator[Answered]:
    prompts: dict[str, str] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            step: dict[str, Any] = json.loads(line)
            before = prompts.get(step["session"], "")
            prompt = prompts[step["session"]] = before[: step["keep_chars"]] + step["append"]
            yield Answered(prompt, step["output"])


Ids = list[int]


def encoded(tokenizer: Tokenizer, answered: list[Answered]) -> list[tuple[Ids, Ids]]:
    pairs = []
    for one in answered:
        prompt = tokenizer.encode_plain(one.prompt)[-MAX_PROMPT_TOKENS:]
        answer = tokenizer.encode_plain(one.answer)[:MAX_ANSWER_TOKENS]
        if prompt and len(answer) > 1:
            pairs.append((prompt, answer))
    return pairs


def replay(
    workload: str, name: str, drafter: Drafter, pairs: list[tuple[Ids, Ids]], limit: int
) -> Row:
    steps = drafted = accepted = 0
    for prompt, answer in pairs:
        known = np.array(prompt, np.int32)
        drafter.start(0, DraftedSequence(known_ids=known, prompt_tokens=len(known)))
        drafter.extend(0, answer[:1])
        place = 1
        while place < len(answer):
            draft_tokens = drafter.draft(0, limit)
            following = answer[place : place + len(draft_tokens) + 1]
            held = 0
            while (
                held < len(draft_tokens)
                and held < len(following)
                and draft_tokens[held] == following[held]
            ):
                held += 1
            drafter.extend(0, following[: held + 1])
            place += held + 1
            steps += 1
            drafted += len(draft_tokens)
            accepted += held
        drafter.end(0)
    tokens = sum(len(answer) - 1 for _, answer in pairs)
    return Row(workload, name, len(pairs), tokens, steps, drafted, accepted)


def drafter_of(spec: str) -> Callable[[], Drafter]:
    """Return a maker of the drafter for text like `suffix:max_depth=32,max_factor=2`."""
    name, _, text = spec.partition(":")
    options = {
        key: json.loads(value)
        for key, _, value in (part.partition("=") for part in text.split(",") if part)
    }
    return lambda: DRAFTERS[name](**options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--drafter", nargs="+", default=list(DRAFTERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = embedded_tokenizer()
    if options.tokenizer is not None:
        tokenizer = Tokenizer.from_directory(options.tokenizer)
    workloads = {"edits": list(edits(options.files)), "goes on": list(goes_on(options.files))}
    if options.agents is not None:
        workloads["agents"] = list(agents(options.agents))
    rows = []
    print(f"{'':<8} {'drafter':<48} {'tokens/step':>11} {'drafted':>7} {'held':>5}")
    for workload, answered in workloads.items():
        pairs = encoded(tokenizer, answered)
        for spec in options.drafter:
            row = replay(workload, spec, drafter_of(spec)(), pairs, options.limit)
            rows.append({**asdict(row), "tokens_per_step": row.tokens_per_step})
            print(
                f"{workload:<8} {spec:<48} {row.tokens_per_step:>11.3f} "
                f"{row.drafted / row.steps:>7.2f} {row.accepted / max(1, row.drafted):>5.2f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
