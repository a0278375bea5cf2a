"""Compares speculation of others with ours: the same files, prompts and draft model, one stream.

    drafter   aioserve           transformers                  llama.cpp
    lookup    suffix             prompt lookup                 prompt lookup
                                 (`prompt_lookup_num_tokens`)  (`LlamaPromptLookupDecoding`)
    model     the draft model    assisted generation with it   none
                                 (`assistant_model`)

A model in a directory is compared with transformers, and one in a GGUF file with llama.cpp as
llama-cpp-python has it. Both answer greedily, with the same dtype (llama.cpp: that of the file) and
number of threads. They answer first without and then with each drafter, in one process and in turn.
Each ratio is to the same engine without speculation, of the best of `--repeats` runs. The last
column is the ratio of aioserve's speed with speculation to the other's with its own.

    python benchmarks/speculation_beside.py
    python benchmarks/speculation_beside.py --model DIR --drafters lookup --workload edits
    python benchmarks/speculation_beside.py --model FILE.gguf --workload agents
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from speculation import TRACES
from speculation_workloads import Sizes, asks_by_messages, sessions_of

from aioserve import Engine, SamplingParams, Speculation
from aioserve.assets import draft_path, model_path

OFF = "off"
OURS = {"lookup": "suffix", "model": "model"}
MINE = "aioserve"
Rates = dict[tuple[str, str], float]
"""Tokens per second by engine and drafter."""


class Other(Protocol):
    """Engine that isn't ours, with the model in memory."""

    name: str

    def tokens_of(self, drafter: str, prompt: Sequence[int], most: int) -> int:
        """Return the number of tokens in a greedy answer of at most so many."""
        ...


def main() -> None:
    options = parse_arguments()
    os.environ["AIOSERVE_NUM_THREADS"] = str(options.threads)
    prompts = asyncio.run(encoded_prompts(options))
    other = LlamaCpp(options) if is_gguf(options.model) else Transformers(options)
    rates: Rates = {}
    for _ in range(options.repeats):
        for drafter in (OFF, *options.drafters):
            runs = {
                MINE: asyncio.run(ours(drafter, prompts, options)),
                other.name: theirs(other, drafter, prompts, options),
            }
            for engine, rate in runs.items():
                rates[engine, drafter] = max(rate, rates.get((engine, drafter), 0.0))
    print_rates(rates, other.name, options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pyhelp", metavar="pyhelp|DIR|FILE.gguf")
    parser.add_argument("--draft", metavar="DIR", help="the draft model; pyhelp's own for pyhelp")
    parser.add_argument("--drafters", nargs="+", choices=list(OURS), help="default: all there are")
    workloads = ("questions", "edits", "agents")
    parser.add_argument("--workload", choices=workloads, default="questions")
    agents = TRACES / "agent_text_sessions.jsonl.gz"
    parser.add_argument("--agents", type=Path, default=agents, metavar="FILE")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.drafters is None:
        options.drafters = ["lookup"] if is_gguf(options.model) else list(OURS)
    if "model" in options.drafters:
        if is_gguf(options.model):
            parser.error("--drafters: llama-cpp-python has no draft models, so lookup alone")
        if options.draft is None:
            if (found := draft_path(options.model)) is None:
                parser.error(f"--draft is needed: no draft model comes with {options.model}")
            options.draft = str(found)
    return options


def is_gguf(model: str) -> bool:
    return model.endswith(".gguf")


def engine_of(drafter: str, options: argparse.Namespace) -> Engine:
    name = OURS.get(drafter)
    speculation = None
    if name is not None:
        path = f":path={options.draft}" if name == "model" else ""
        most = options.max_draft_tokens
        speculation = Speculation(drafter=name + path, max_tokens=most)
    return Engine(
        options.model,
        dtype=options.dtype,
        speculation=speculation,
        max_model_len=options.prompt_tokens + options.output_tokens,
        num_pages=1024,
    )


async def encoded_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Return token ids of the first prompt of each session."""
    sizes = Sizes(options.output_tokens, options.prompt_tokens, 1, options.agents)
    async with engine_of(OFF, options) as engine:
        by_messages = await asks_by_messages(engine)
        sessions = sessions_of(options.workload, options.prompts, by_messages, 0, sizes)
        if not sessions:
            raise SystemExit(f"{options.workload}: what it is made of isn't there")
        all_ids = [await engine.encode(session.turns[0](())) for session in sessions]
        return [list(ids)[-options.prompt_tokens :] for ids in all_ids]


async def ours(
    drafter: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> float:
    """Return tokens per second of one caller."""
    params = SamplingParams(max_tokens=options.output_tokens, temperature=0)
    async with engine_of(drafter, options) as engine:
        await engine.generate(prompts[0], SamplingParams(max_tokens=4, temperature=0))
        tokens, began = 0, time.perf_counter()
        for prompt in prompts:
            tokens += len((await engine.generate(prompt, params)).token_ids)
        return tokens / (time.perf_counter() - began)


def theirs(
    other: Other, drafter: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> float:
    """Return tokens per second of one caller."""
    other.tokens_of(drafter, prompts[0], 4)
    began = time.perf_counter()
    tokens = [other.tokens_of(drafter, prompt, options.output_tokens) for prompt in prompts]
    return sum(tokens) / (time.perf_counter() - began)


class Transformers:
    """Model and draft model in transformers."""

    name = "transformers"

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        dtype = getattr(torch, options.dtype)

        def loaded(path: str | Path) -> Any:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

        self._model = loaded(model_path(options.model) or options.model)
        self._more: dict[str, dict[str, Any]] = {
            OFF: {},
            "lookup": {"prompt_lookup_num_tokens": options.max_draft_tokens},
        }
        if "model" in options.drafters:
            self._more["model"] = {"assistant_model": loaded(options.draft)}

    def tokens_of(self, drafter: str, prompt: Sequence[int], most: int) -> int:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(prompt)])
            more = self._more[drafter]
            found = self._model.generate(ids, max_new_tokens=most, do_sample=False, **more)
            return found.shape[1] - ids.shape[1]


class LlamaCpp:
    """GGUF file in llama.cpp, once with prompt lookup and once without."""

    name = "llama.cpp"

    def __init__(self, options: argparse.Namespace) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]
        from llama_cpp.llama_speculative import (  # pyright: ignore[reportMissingImports]
            LlamaPromptLookupDecoding,
        )

        lookup = LlamaPromptLookupDecoding(num_pred_tokens=options.max_draft_tokens)
        # Draft tokens of the last step may go beyond the last token that is asked for.
        room = options.prompt_tokens + options.output_tokens + options.max_draft_tokens
        self._models: dict[str, Any] = {
            drafter: llama_cpp.Llama(
                options.model,
                n_ctx=room,
                n_threads=options.threads,
                n_threads_batch=options.threads,
                draft_model=draft,
                verbose=False,
            )
            for drafter, draft in ((OFF, None), ("lookup", lookup))
            if drafter in (OFF, *options.drafters)
        }
        vocab = llama_cpp.llama_model_get_vocab(self._models[OFF].model)
        self._is_end: Callable[[int], bool] = lambda token: llama_cpp.llama_vocab_is_eog(
            vocab, token
        )

    def tokens_of(self, drafter: str, prompt: Sequence[int], most: int) -> int:
        model = self._models[drafter]
        model.reset()  # forgets the prompt before
        tokens: Iterable[int] = model.generate(list(prompt), temp=0.0)
        count = 0
        for token in islice(tokens, most):
            count += 1
            if self._is_end(token):
                break
        return count


def print_rates(rates: Rates, other: str, options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    dtype = "as stored" if is_gguf(options.model) else options.dtype
    title = f"{Path(options.model).name}, {dtype}, {options.workload}: tokens/s (ratio)"
    table = Table(title=title, box=None)
    columns: list[tuple[str, Callable[[str], str]]] = [("drafter", str)]
    for engine in (MINE, other):

        def cell(drafter: str, engine: str = engine) -> str:
            rate = rates[engine, drafter]
            return f"{rate:,.0f} ({rate / rates[engine, OFF]:.2f})"

        columns.append((engine, cell))
    columns.append((f"{MINE} to {other}", lambda d: f"{rates[MINE, d] / rates[other, d]:.2f}"))
    for name, _ in columns:
        table.add_column(name, justify="right")
    for drafter in (OFF, *options.drafters):
        table.add_row(*[cell(drafter) for _, cell in columns])
    Console().print(table)


if __name__ == "__main__":
    main()
