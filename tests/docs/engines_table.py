"""Tables of other engines' options in docs/how-to/come-from-other-engines.md.

The answers are those of the command itself: each is `aioserve serve`'s reply to the option.

    python -m tests.docs.engines_table

writes them anew, between their marks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from aioserve.cli import option_names
from aioserve.cli.serve import serve
from aioserve.other_engines.answers import on_command_line

__all__ = ["OPTIONS", "PAGE", "answer", "inside", "rewritten", "table"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "come-from-other-engines.md"
OPTIONS: Final[dict[str, str]] = {
    "vllm": (
        "--tensor-parallel-size --dtype --quantization --max-model-len --gpu-memory-utilization "
        "--max-num-seqs --max-num-batched-tokens --block-size --swap-space --kv-cache-dtype "
        "--enable-prefix-caching --no-enable-prefix-caching --enable-chunked-prefill "
        "--speculative-config --enable-lora --served-model-name --api-key --chat-template "
        "--enable-auto-tool-choice --tool-call-parser --reasoning-parser --enforce-eager --seed "
        "--trust-remote-code --tokenizer --disable-log-requests"
    ),
    "llama-cpp": (
        "--ctx-size --batch-size --ubatch-size --parallel --threads --threads-batch "
        "--n-gpu-layers --cache-type-k --flash-attn --mlock --no-mmap --model-draft "
        "--draft-max --cache-ram --alias --jinja --grammar --temp --repeat-penalty --lora "
        "--embedding --host --port"
    ),
    "sglang": (
        "--tp-size --mem-fraction-static --max-running-requests --chunked-prefill-size "
        "--schedule-policy --disable-radix-cache --context-length --attention-backend "
        "--hicache-size --grammar-backend"
    ),
}
"""Options that users of each engine name most, by the mark of its table."""


def answer(option: str) -> str:
    """The reply of `aioserve serve` to `option`, without the option itself."""
    known = option_names(serve)
    if option.removeprefix("--").removeprefix("no-").replace("-", "_") in known:
        return f"`{option}`, the same"
    said = on_command_line(option, known)
    assert said is not None, f"aioserve serve has no answer to {option}"
    text = said.partition(" isn't an option here: ")[2].replace("|", "\\|")
    return re.sub(r"(?<!`)--[a-z][\w-]*", r"`\g<0>`", text)


def table(engine: str) -> str:
    rows = (f"| `{option}` | {answer(option)} |\n" for option in OPTIONS[engine].split())
    return "| there | here |\n| --- | --- |\n" + "".join(rows)


def marks(engine: str) -> tuple[str, str]:
    return f"<!-- {engine}: begin -->\n", f"<!-- {engine}: end -->\n"


def inside(text: str, engine: str) -> str:
    """The table of `engine` that a page has."""
    begin, end = marks(engine)
    return text.partition(begin)[2].partition(end)[0]


def rewritten(text: str) -> str:
    """The page with all its tables made anew."""
    for engine in OPTIONS:
        begin, end = marks(engine)
        before, _, rest = text.partition(begin)
        text = before + begin + table(engine) + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
