"""Times how long chat templates take to load and to render.

    python benchmarks/chat_templates.py DIRECTORY [--only WORD ...]

Prints a line for each template (*.jinja) in the directory, such as that of
`tools/published_templates`. It has the milliseconds to load it, and to render conversations of 1, 9
and 4,096 messages, the least of some tries.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from aioserve import InvalidPromptError, RequestFailedError
from aioserve.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TRIES = {1: 200, 9: 100, 4096: 2}
"""Tries by the number of messages."""


def conversation(num_messages: int) -> list[dict[str, str]]:
    messages = [
        {"role": ("user", "assistant")[turn % 2], "content": f"Message {turn}. " + "word " * 8}
        for turn in range(num_messages)
    ]
    return messages if num_messages % 2 else [*messages[:-2], messages[0]]


def milliseconds(call: Callable[[], object], tries: int) -> float:
    taken: list[float] = []
    for _ in range(tries):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken) * 1e3


def measured(source: str, name: str) -> dict[str, float]:
    """Return milliseconds by operation; those that the template refuses are left out."""

    def load() -> ChatTemplate:
        return ChatTemplate(source, special_tokens=SPECIAL, origin=name)

    row = {"load": milliseconds(load, 3)}
    template = load()
    for num_messages, tries in TRIES.items():
        messages = conversation(num_messages)
        try:
            row[f"{num_messages}"] = milliseconds(lambda m=messages: template.render(m), tries)
        except (InvalidPromptError, RequestFailedError):
            continue
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    given = parser.parse_args()
    files = sorted(given.directory.rglob("*.jinja"))
    for file in files:
        if given.only and not any(word in file.name for word in given.only):
            continue
        row = measured(file.read_text(), file.name)
        print(file.name, *(f"{key}: {value:.3f}" for key, value in row.items()), sep="  ")


if __name__ == "__main__":
    main()
