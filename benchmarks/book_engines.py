"""Claims of the books that need an engine with a model: counted where counts decide, by turns where
a clock does.

The models are the embedded one, the teaching model of `techniques.py`, and a random one of 30 M
parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

import acceptance
import beams
import formats
import structured
import technique_runs
from book_claims import CANT, CORRECTED, HOLDS, IN_PART, NANO, NOT, SCRATCH, UNBUILT, Claim, Found
from speculation_workloads import WORKLOADS
from teaching import write_model

from aioserve import Engine, SamplingParams, StructuredOutput
from aioserve.cli._models import model_or_random

TECHNIQUES = Namespace(requests=32, prefix_tokens=100, output_tokens=20, seats=8, chunk_tokens=256)
"""Nano-Serving's own workload: 32 requests, 100 tokens in common, 10 to 29 of their own, 20 out."""
BOOK_TOKENS = sum(100 + 10 + number % 20 + 20 for number in range(32))
"""Tokens of all prompts and completions in the book's own listing of that workload."""
PLAIN = "one at a time, no KV cache"
CACHED = "+ prefix cache"
LAST = "+ chunked prefill"


@cache
def techniques() -> dict[str, dict[str, Any]]:
    """Rows of `techniques.py`, one run each, by name."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "teaching")
        with contextlib.redirect_stderr(io.StringIO()):
            runs = technique_runs.run_all(technique_runs.technique_rows(TECHNIQUES), model, 1)
    return {row["name"]: row for row in technique_runs.technique_table(runs)}


def steps() -> Found:
    rows = techniques()
    first, cached, last = rows[PLAIN]["steps"], rows[CACHED]["steps"], rows[LAST]["steps"]
    here = (
        f"{first} steps become {cached}, {first / cached:.0f} times fewer; with chunks {last}, "
        f"{first / last:.0f} times"
    )
    why = (
        "32 requests share each step. The book counts 4,960 steps one at a time, more than the "
        f"{BOOK_TOKENS:,} tokens of its prompts and completions"
    )
    return Found(here, HOLDS, why)


def hits() -> Found:
    rows = techniques()
    prompts = 32 * 100 + sum(
        len(prompt) - 100 for prompt in technique_runs.teaching_prompts(32, 100)
    )
    bound = 31 * 100 / prompts
    here = (
        f"{rows[CACHED]['hit_share']:.1%} in whole pages, {rows[LAST]['hit_share']:.1%} with parts "
        f"of pages; {bound:.1%} is all that there is"
    )
    why = (
        "31 of 32 prompts find the 100 tokens, or the six pages that these fill. 61.5 % doesn't "
        "follow from the workload"
    )
    return Found(here, NOT, why)


def memory() -> Found:
    rows = techniques()
    paged, shared = rows["+ paged memory"], rows[CACHED]
    here = (
        f"{paged['contiguous_ratio']:.1f} times less in pages, {shared['contiguous_ratio']:.1f} "
        "times less where they are shared"
    )
    why = "Their 17 counts 120 tokens a request; the workload has up to 149, in whole pages"
    return Found(here, IN_PART, why)


def tokens_per_second() -> Found:
    rows = techniques()
    rate = 32 * 20 / rows[LAST]["seconds"]
    ratio = rows[PLAIN]["seconds"] / rows[LAST]["seconds"]
    here = f"{rate:,.0f} tokens/s, {ratio:.0f} times as fast as one at a time without a KV cache"
    why = (
        "Their engine draws from random numbers: `SimplifiedGPT` computes no model. Here four "
        "layers are computed, on the processor at hand"
    )
    return Found(here, CANT, why)


# -- sharing


def sharing() -> Found:
    sizes = Namespace(beam_width=4, prompt_tokens=256, max_tokens=32, page_size=16)
    pages = asyncio.run(beams.count_pages(sizes))
    saved = 1 - sum(pages.shared) / sum(pages.copies)
    here = f"{saved:.0%} fewer pages for 4 beams behind 256 tokens, 32 out"
    why = "Longer prompts share more, longer completions less"
    return Found(here, HOLDS if saved >= 0.55 else IN_PART, why)


# -- structured output


async def form_steps(*, jump_forward: bool) -> tuple[int, int]:
    """Steps and tokens of one answer in the form of `structured.py`."""
    form = StructuredOutput(json_schema=structured.SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(max_tokens=128, temperature=0, structured_output=form)
    async with Engine("pyhelp", num_pages=256, jump_forward=jump_forward) as engine:
        before = engine.stats().steps_total
        answer = await engine.generate(list(range(10, 42)), params)
        return engine.stats().steps_total - before, len(answer.token_ids)


def jumps() -> Found:
    slow, tokens = asyncio.run(form_steps(jump_forward=False))
    fast, same = asyncio.run(form_steps(jump_forward=True))
    assert tokens == same
    here = f"{slow} steps become {fast} for {tokens} tokens of JSON, {slow / fast:.1f} times fewer"
    why = (
        "The schema forces names and braces, which need no step of their own. How much is forced "
        "depends on the schema"
    )
    return Found(here, HOLDS if slow / fast >= 5 else IN_PART, why)


# -- draft tokens


def drafts() -> Found:
    names = ("suffix", "EAGLE-3 head", "same family", "the model in int4")
    options = Namespace(
        model="pyhelp",
        drafts={name: acceptance.DRAFTS[name].replace("{model}", "pyhelp") for name in names},
        draft_tokens=8,
        workloads=["questions", "edits"],
        temperatures=[0.0],
        sessions=4,
        turns=2,
        output_tokens=64,
        max_model_len=1024,
        num_pages=1024,
        dtype="auto",
        agents=acceptance.TRACES,
    )
    assert set(options.workloads) <= set(WORKLOADS)
    with contextlib.redirect_stderr(io.StringIO()):
        rows = asyncio.run(acceptance.measure(options))
    cells = {(row.draft, row.workload): row for row in rows}
    parts = [
        f"{name}: {cells[name, 'questions'].tokens_per_step:.2f} and "
        f"{cells[name, 'edits'].tokens_per_step:.2f}"
        for name in names
    ]
    assert not any(row.other for row in rows)
    here = "tokens a step, questions and edits: " + "; ".join(parts) + "; no token differs"
    why = (
        "A step with draft tokens takes longer, so speed gains less than steps. What a draft knows "
        "of the text decides, more than its kind"
    )
    return Found(here, IN_PART, why)


# -- formats


Speeds = dict[str, dict[str, list[float]]]


@cache
def speeds() -> Speeds:
    """Speeds of a random model of 30 M parameters in int8 and int4, to bfloat16's, sorted.

    Medians of three runs, of three rounds each, by turns."""
    model = str(model_or_random("random:30m"))
    given: dict[str, dict[str, Any]] = {
        "bfloat16": {},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
    }
    variants = [
        formats.Variant(name, model, {"dtype": "bfloat16", **options})
        for name, options in given.items()
    ]
    options = Namespace(formats=variants, rounds=3)
    runs = [asyncio.run(formats.measure_speeds(options)) for _ in range(3)]
    return {
        name: {kind: sorted(run[place][kind] for run in runs) for kind in runs[0][place]}
        for place, name in enumerate(given)
    }


def spread(ratios: list[float]) -> str:
    return f"{ratios[0]:.2f} to {ratios[-1]:.2f}"


def gptq() -> Found:
    ratios = speeds()["int4"]["decode_ratio"]
    here = f"{spread(ratios)} times the speed of decode, int4 to bfloat16, on this CPU"
    why = "Their figure is of 3 bits on an A100. One stream reads all weights for each token"
    return Found(here, CANT, why)


def smoothquant() -> Found:
    ratios = speeds()["int8"]["prompt_ratio"]
    here = f"{spread(ratios)} times the speed of prompts, int8 to bfloat16, on this CPU"
    why = "Their figure is of GPUs. Rows are rounded to int8 as in SmoothQuant, without its shift"
    return Found(here, CANT, why)


def qualities() -> Found:
    license_ = Path(__file__).resolve().parents[1] / "LICENSE"
    plain = formats.Variant("bfloat16", "pyhelp", {})
    options = Namespace(formats=[plain], text=license_, max_tokens=400)
    parts = []
    for name in ("int8", "int4"):
        found = formats.quality(formats.Variant(name, "pyhelp", {"quantization": name}), options)
        divergence = found["comparison"]["kl_nats_per_token"]["value"]
        speed = spread(speeds()[name]["decode_ratio"])
        parts.append(f"{name}: {divergence:.4f} nats a token from bfloat16, decode {speed}")
    why = (
        "Its table and its figure rank them unlike. Fewer bits are farther from the model; on a "
        "busy machine speeds of runs differ more than those of formats"
    )
    return Found("; ".join(parts), CORRECTED, why)


def cascade() -> Found:
    why = "Later work has several models in one process, and a rule for whose completion is kept"
    return Found("no figure: there is one model to an engine", UNBUILT, why)


def disaggregation() -> Found:
    why = "Later work on many machines has roles for replicas, and moves pages between them"
    return Found("no figure: prefill and decode share each step", UNBUILT, why)


CLAIMS = (
    Claim("steps-32x", NANO, "32 times fewer steps", "its workload of 32 requests", steps),
    Claim("hits-61.5", NANO, "61.5 % of prompt tokens are hits", "the same workload", hits),
    Claim("memory-17x", NANO, "17 times less KV memory", "the same, 2,048 set aside", memory),
    Claim(
        "tokens-19032",
        NANO,
        "19,032 tokens a second",
        "the same, its processor unnamed",
        tokens_per_second,
        varies=True,
    ),
    Claim(
        "sharing-55",
        SCRATCH,
        "sharing saves up to 55 % of KV memory (vLLM)",
        "beam search and several samples of a prompt",
        sharing,
        varies=True,
    ),
    Claim(
        "structured-5x",
        SCRATCH,
        "up to 5 times the speed on structured output (SGLang)",
        "JSON by a schema",
        jumps,
        varies=True,
    ),
    Claim(
        "drafts-2-to-6.5x",
        SCRATCH,
        "2 to 6.5 times the speed by kind of draft, identical outputs",
        "draft models, EAGLE heads, lookup",
        drafts,
        varies=True,
    ),
    Claim(
        "gptq-3.25x", SCRATCH, "3.25 times the speed (GPTQ)", "one stream, A100", gptq, varies=True
    ),
    Claim(
        "smoothquant-1.56x",
        SCRATCH,
        "1.56 times the speed (SmoothQuant)",
        "weights and activations in 8 bits, GPUs",
        smoothquant,
        varies=True,
    ),
    Claim(
        "formats",
        SCRATCH,
        "formats by quality and speed",
        "a table, and a figure that contradicts it",
        qualities,
        varies=True,
    ),
    Claim("cascade", SCRATCH, "a cascade costs 60 % less", "a small model first", cascade),
    Claim(
        "disaggregation",
        SCRATCH,
        "prefill apart from decode serves 7.4 times the load (DistServe)",
        "both on GPUs of their own",
        disaggregation,
    ),
)
