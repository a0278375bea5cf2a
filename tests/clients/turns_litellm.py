"""Conversations of three turns with litellm. Prints the ones that went well.

OPENAI_API_KEY=... python turns_litellm.py URL
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # asks no other host

import litellm
from turns import ADD, in_chat, run

litellm.suppress_debug_info = True


def _ask(about: Any, messages: list[Any]) -> Any:
    return litellm.completion(**about, messages=messages, tools=[ADD]).choices[0].message


def whole_messages(about: Any) -> None:
    in_chat(lambda messages: _ask(about, messages))


def dumped_messages(about: Any) -> None:
    in_chat(lambda messages: _ask(about, messages), lambda message: message.model_dump())


def streamed_messages(about: Any) -> None:
    def ask(messages: list[Any]) -> Any:
        chunks = list(litellm.completion(**about, messages=messages, tools=[ADD], stream=True))
        return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message

    in_chat(ask)
    in_chat(ask, lambda message: message.model_dump())


def messages_of_anthropic(about: Any) -> None:
    about = {**about, "model": "anthropic/scripted", "api_base": about["api_base"][:-3]}
    about |= {"api_key": os.environ["OPENAI_API_KEY"], "max_tokens": 200}
    in_chat(lambda messages: _ask(about, messages))


CHECKS = (whole_messages, dumped_messages, streamed_messages, messages_of_anthropic)

if __name__ == "__main__":
    about = {"model": "openai/scripted", "api_base": f"{sys.argv[1]}/v1", "num_retries": 0}
    run(CHECKS, about)
