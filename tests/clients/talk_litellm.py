"""Common uses of litellm, tried on a server. Prints the ones that worked.

OPENAI_API_KEY=... python talk_litellm.py PYHELP_URL SCRIPTED_URL
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # asks no other host

import litellm

litellm.suppress_debug_info = True
USER: Any = [{"role": "user", "content": "What does json.dumps do?"}]


def chats(asked: Any) -> None:
    whole = litellm.completion(**asked)
    content = whole.choices[0].message.content
    assert content
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content


def completes(asked: Any) -> None:
    asked = {**asked, "model": "text-completion-openai/pyhelp", "prompt": "json.dumps"}
    del asked["messages"]
    assert litellm.text_completion(**asked).choices[0].text


def embeds(asked: Any) -> None:
    found = litellm.embedding(model="openai/pyhelp", input=["json"], api_base=asked["api_base"])
    assert len(found.data) == 1


def is_told_what_is_wrong(asked: Any) -> None:
    try:
        litellm.completion(**{**asked, "temperature": 1000})
    except litellm.BadRequestError as told:
        assert "temperature" in str(told)
    else:
        raise AssertionError("a temperature of 1000 was taken")


def main() -> None:
    asked: Any = {
        "model": "openai/pyhelp",
        "messages": USER,
        "max_tokens": 16,
        "temperature": 0,
        "api_base": f"{sys.argv[1]}/v1",
        "num_retries": 0,
    }
    for check in (chats, completes, embeds, is_told_what_is_wrong):
        check(asked)
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
