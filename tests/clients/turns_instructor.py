"""Conversations with instructor, which sends a failed answer back until it is good.

Prints the ones that went well.

OPENAI_API_KEY=... python turns_instructor.py URL
"""

from __future__ import annotations

import sys
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel, field_validator
from turns import NUM_TURNS, QUESTION, run

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)
ABOUT: Any = {"model": "scripted"}
tries: list[int] = []


class Add(BaseModel):
    a: int
    b: int


class Third(Add):
    @field_validator("a")
    @classmethod
    def third(cls, value: int) -> int:
        tries.append(value)
        if len(tries) < 3:
            raise ValueError("once more, please")
        return value


def asks_again(url: str) -> None:
    for mode in MODES:
        tries.clear()
        client = instructor.from_openai(OpenAI(base_url=url, max_retries=0), mode=mode)
        client.chat.completions.create(
            **ABOUT,
            messages=[{"role": "user", "content": QUESTION}],
            response_model=Third,
            max_retries=3,
        )
        assert len(tries) == 3, tries


def goes_on(url: str) -> None:
    for mode in MODES:
        client = instructor.from_openai(OpenAI(base_url=url, max_retries=0), mode=mode)
        messages: list[Any] = []
        for _ in range(NUM_TURNS):
            messages.append({"role": "user", "content": QUESTION})
            found, whole = client.chat.completions.create_with_completion(
                **ABOUT, messages=messages, response_model=Add
            )
            assert (found.a, found.b) == (1, 2)
            message = whole.choices[0].message
            messages.append(message.model_dump())
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "good"})


def streams(url: str) -> None:
    for mode in MODES:
        client = instructor.from_openai(OpenAI(base_url=url, max_retries=0), mode=mode)
        asked: Any = {**ABOUT, "messages": [{"role": "user", "content": QUESTION}]}
        parts = list(client.chat.completions.create_partial(**asked, response_model=Add))
        assert (parts[-1].a, parts[-1].b) == (1, 2)


CHECKS = (asks_again, goes_on, streams)

if __name__ == "__main__":
    run(CHECKS, f"{sys.argv[1]}/v1")
