"""Sessions that `speculation.py` measures with: turns of one caller, one after the other.

    questions   three questions about Python's library, one conversation
    edits       a function of the standard library is to be written again, with a parameter named
                otherwise
    agents      steps of one of the agent sessions in a file of `agent_text_sessions.jsonl.gz`'s
                columns, with their recorded text
    random      random token ids, and a completion drawn at temperature 1 past end-of-sequence ids:
                nothing comes again

The first three are greedy, or drawn at the given temperature with a seed for each session. A model
with a chat template gets messages, another one text that it continues.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve import AioserveError, Engine, SamplingParams
from aioserve.assets import model_path

__all__ = ["WORKLOADS", "Session", "Sizes", "asks_by_messages", "sessions_of"]

MESSAGES = [{"role": "user", "content": "Is there a template?"}]
QUESTIONS_OF_SESSION = 3
LEAST_EDITED_CHARS = 200
RENAMED = "renamed"
"""New name of the parameter of a function."""


@dataclass(frozen=True)
class Sizes:
    output_tokens: int
    prompt_tokens: int
    """Most tokens of a prompt; of a longer one, its end is taken."""
    turns: int
    """Most turns of a session."""
    agents: Path
    temperature: float = 0.0
    """Temperature of all workloads but `random`."""


Turns = Sequence[Callable[[Sequence[str]], Any]]
"""Functions that make a prompt from the completions before it."""


@dataclass(frozen=True)
class Session:
    """Turns that one caller asks for, one after the other."""

    turns: Turns
    params: SamplingParams

    def drawn_at(self, temperature: float, seed: int) -> Session:
        """Return the same session, with other draws."""
        return replace(
            self, params=msgspec.structs.replace(self.params, temperature=temperature, seed=seed)
        )


async def asks_by_messages(engine: Engine) -> bool:
    """Return true if the model has a chat template."""
    try:
        await engine.encode(MESSAGES)
    except AioserveError:
        return False
    return True


def sessions_of(
    workload: str, count: int, by_messages: bool, vocab_size: int, sizes: Sizes
) -> list[Session]:
    """Return `count` sessions, the same in each call; none if their source isn't there."""
    made = WORKLOADS[workload](by_messages, vocab_size, sizes)
    return list(islice(made, count))


Made = TypeVar("Made", Turns, Session)
Making = Callable[[bool, int, Sizes], Iterator[Made]]
"""Makes items without end, or as many as there are.

Arguments are `by_messages`, the size of the vocabulary, and sizes.
"""


def _seeded(turns_of: Making[Turns]) -> Making[Session]:
    """Return a maker of sessions with these turns, each with a seed of its own."""

    def sessions(by_messages: bool, vocab_size: int, sizes: Sizes) -> Iterator[Session]:
        for seed, turns in enumerate(turns_of(by_messages, vocab_size, sizes)):
            params = SamplingParams(
                max_tokens=sizes.output_tokens, temperature=sizes.temperature, seed=seed
            )
            yield Session(turns, params)

    return sessions


def _questions(by_messages: bool, vocab_size: int, sizes: Sizes) -> Iterator[Turns]:
    directory = model_path("pyhelp")
    if directory is None:
        return
    pairs = json.loads((directory / "questions.json").read_text(encoding="utf-8"))
    questions = cycle([question for question, _ in pairs])
    while True:
        asked = list(islice(questions, min(QUESTIONS_OF_SESSION, sizes.turns)))
        yield [_question(asked[: place + 1], by_messages) for place in range(len(asked))]


def _question(asked: Sequence[str], by_messages: bool) -> Callable[[Sequence[str]], Any]:
    def prompt(answers: Sequence[str]) -> Any:
        if not by_messages:
            before = zip(asked, answers, strict=False)
            told = "".join([f"Question: {one}\nAnswer: {answer}\n" for one, answer in before])
            return f"{told}Question: {asked[-1]}\nAnswer:"
        messages = [{"role": "user", "content": asked[0]}]
        for answer, question in zip(answers, asked[1:], strict=True):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": question})
        return messages

    return prompt


def _edits(by_messages: bool, vocab_size: int, sizes: Sizes) -> Iterator[Turns]:
    # A token of source is three characters or more.
    most = 3 * min(sizes.output_tokens, sizes.prompt_tokens // 2)
    for source, parameter in cycle(list(_functions(min(LEAST_EDITED_CHARS, most // 2), most))):
        told = f"with its parameter `{parameter}` named `{RENAMED}`"
        if by_messages:
            content = f"Write this function again, {told}.\n\n```python\n{source}\n```"
            prompt: Any = [{"role": "user", "content": content}]
        else:
            prompt = f"A function:\n\n```python\n{source}\n```\n\nThe same {told}:\n\n```python\n"
        yield [lambda _, prompt=prompt: prompt]


def _functions(least_chars: int, most_chars: int) -> Iterator[tuple[str, str]]:
    """Yield functions of the standard library of a given length, each with the name of a parameter.

    At most two come from a file, so that they differ in style.
    """
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        of_file = 0
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef) or not node.args.args:
                continue
            source = ast.get_source_segment(text, node) or ""
            if of_file < 2 and least_chars <= len(source) <= most_chars:
                of_file += 1
                yield source, node.args.args[0].arg


def _agents(by_messages: bool, vocab_size: int, sizes: Sizes) -> Iterator[Turns]:
    if not sizes.agents.is_file():
        return
    prompts: dict[str, list[str]] = {}
    with gzip.open(sizes.agents, "rt", encoding="utf-8") as lines:
        for line in lines:
            step = json.loads(line)
            own = prompts.setdefault(step["session"], [])
            before = own[-1] if own else ""
            own.append(before[: step["keep_chars"]] + step["append"])
    for own in prompts.values():
        yield [_agent_step(text, by_messages) for text in own[: sizes.turns]]


def _agent_step(text: str, by_messages: bool) -> Callable[[Sequence[str]], Any]:
    prompt: Any = [{"role": "user", "content": text}] if by_messages else text
    return lambda _: prompt


def _random(by_messages: bool, vocab_size: int, sizes: Sizes) -> Iterator[Session]:
    source = random.Random(0)
    count = min(64, sizes.prompt_tokens)
    while True:
        ids = [source.randrange(vocab_size) for _ in range(count)]
        params = SamplingParams(
            max_tokens=sizes.output_tokens,
            temperature=1.0,
            seed=source.randrange(1 << 30),
            ignore_eos=True,
        )
        yield Session([lambda _, ids=ids: ids], params)


WORKLOADS: dict[str, Making[Session]] = {
    "questions": _seeded(_questions),
    "edits": _seeded(_edits),
    "agents": _seeded(_agents),
    "random": _random,
}
