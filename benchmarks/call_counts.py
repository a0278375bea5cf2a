"""Counts Python calls of the package for one token: in a decode step, as a first token, in a chat.

    python benchmarks/call_counts.py [--steps 64] [--repeats 5] [--json FILE]

An engine with the embedded model streams greedy completions. It counts every call of a Python
function of `aioserve` and of the bundled policies, by the file of the function and the calling
thread. Functions of the standard library and of other packages aren't counted.

    decode step    a steady step of one stream: calls per step, over `--steps` steps
    first token    from the call of `stream` on to the first token of a short prompt
    chat call      a message that is answered with one token: from the call of `chat` on to its
                   completion

The least of `--repeats` is printed: on a busy machine the loop finds some steps late, which takes a
few calls more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import aioserve
import aioserve_plugins
from aioserve import Engine, SamplingParams

PLACES = tuple(f"{Path(p.__file__).parent}/" for p in (aioserve, aioserve_plugins) if p.__file__)
PROMPT = "What does json.dumps do?"
WARM_TOKENS = 8
INLINED = {"<listcomp>", "<setcomp>", "<dictcomp>"}
"""Calls in Python 3.11, but not from 3.12 on: they aren't counted, so that versions agree."""

CallSite = tuple[str, str, bool]
"""File, function, and true if the thread is that of the event loop."""


class CallCounter:
    """Counts calls of the package's functions in all threads, while it is on."""

    def __init__(self) -> None:
        self.calls: Counter[CallSite] = Counter()
        self._is_on = False
        self._loop_thread = threading.get_ident()

    def install(self) -> None:
        """Install it for this thread, and for those that begin from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def uninstall(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @contextmanager
    def counting(self) -> Iterator[Counter[CallSite]]:
        """Count calls inside."""
        self.calls = Counter()
        self._is_on = True
        try:
            yield self.calls
        finally:
            self.stop()

    def stop(self) -> None:
        self._is_on = False

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._is_on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(PLACES) and code.co_name not in INLINED:
                on_loop = threading.get_ident() == self._loop_thread
                self.calls[code.co_filename, code.co_qualname, on_loop] += 1


async def decode_calls(counter: CallCounter, num_steps: int) -> dict[str, float]:
    """Return the calls per step of one stream that decodes."""
    async with Engine("pyhelp") as engine:
        params = SamplingParams(
            temperature=0, max_tokens=num_steps + 4 * WARM_TOKENS, ignore_eos=True
        )
        async with engine.stream(PROMPT, params) as stream:
            for _ in range(WARM_TOKENS):
                await anext(stream)
            before = engine.stats().steps_total
            with counter.counting() as calls:
                for _ in range(num_steps):
                    await anext(stream)
            steps = engine.stats().steps_total - before
    return summary(calls, steps)


async def first_token_calls(counter: CallCounter) -> dict[str, float]:
    """Return the calls from `stream` to the first token, of an engine that has served before."""
    async with Engine("pyhelp") as engine:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        await engine.generate("def main():", params)
        with counter.counting() as calls:
            async with engine.stream(PROMPT, params) as stream:
                await anext(stream)
                counter.stop()  # ends before the stream is closed, which takes calls too
    return summary(calls, 1)


async def chat_calls(counter: CallCounter) -> dict[str, float]:
    """Return the calls from `chat` to a completion of one token, of an engine that has served
    before.
    """
    async with Engine("pyhelp") as engine:
        params = SamplingParams(temperature=0, max_tokens=1)
        for _ in range(2):
            with counter.counting() as calls:
                async with engine.chat([{"role": "user", "content": PROMPT}], params) as stream:
                    await stream.completion()
            engine.reset_prefix_cache()
    return summary(calls, 1)


def summary(calls: Counter[CallSite], steps: int) -> dict[str, float]:
    """Return calls per step, those on the loop, and the number of files that they are in.

    A file counts with one call in four steps, so that occasional calls are left out.
    """
    often = {site: n for site, n in calls.items() if 4 * n >= steps}
    return {
        "calls": round(sum(calls.values()) / steps, 1),
        "on the loop": round(sum(n for site, n in calls.items() if site[2]) / steps, 1),
        "files": len({site[0] for site in often}),
    }


def least(measure: Callable[[], dict[str, float]], repeats: int) -> dict[str, float]:
    """Return the run with the fewest calls."""
    return min((measure() for _ in range(repeats)), key=lambda figures: figures["calls"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="the N functions most called"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counter = CallCounter()
    counter.install()
    try:
        rows = {
            "decode step": least(
                lambda: asyncio.run(decode_calls(counter, options.steps)), options.repeats
            ),
            "first token": least(lambda: asyncio.run(first_token_calls(counter)), options.repeats),
            "chat call": least(lambda: asyncio.run(chat_calls(counter)), options.repeats),
        }
    finally:
        counter.uninstall()
    for name, row in rows.items():
        print(f"{name:<14}" + "  ".join(f"{value:g} {what}" for what, value in row.items()))
    if options.show:
        print("most called in a chat call:")
        for (file, function, _), n in counter.calls.most_common(options.show):
            print(f"{n:5}  {Path(file).name}:{function}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
