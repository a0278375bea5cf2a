"""A trained model of four formats of GGUF: tokens, perplexity, and what integer activations cost.

`gemma3_270m.json` has the ids of some prompts, and 40 greedy tokens behind each, of transformers in
float32 with the same dequantised weights (`AutoModelForCausalLM.from_pretrained(DIR,
gguf_file=FILE, dtype=torch.float32)`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aioserve import Engine, SamplingParams
from aioserve.models.files import model_files
from aioserve.models.loader import load_model
from aioserve.ops import Backend, backend_named
from tests.parity.paged import PagedRun

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

REFERENCE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "gemma3_270m.json").read_text(encoding="utf-8")
)
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
BEHIND_LICENSE = [
    9078, 8240, 2863, 577, 24897, 531, 577, 496, 75798, 107, 142, 1708, 506, 8616, 529,
    672, 11440, 236761, 108, 139, 236825, 236761, 5375, 12987, 236761, 1599, 1149, 13103,
    496, 75798, 531, 506, 9078, 8240, 107, 142, 2003, 1599, 236764, 528,
]  # fmt: skip
"""Greedy tokens of the same transformers behind the first 1,500 of `TEXT`: thrice the window."""
LLAMA_CPP_PERPLEXITY = 10.1452
"""Result of `llama-perplexity -m FILE -f LICENSE -c 512`, as llama.cpp is in llama-cpp-python
0.3.36, on a processor with AVX-512 and VNNI."""
STATED_GAP = 0.6
"""Largest difference of the two largest logits at which integers may choose another token."""


def test_ids_are_those_of_the_tokenizer_that_it_came_with(gemma: Path) -> None:
    tokenizer = model_files(gemma).tokenizer()
    for one in REFERENCE:
        ids = tokenizer.encode(one["text"])
        assert list(ids) == one["prompt"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == one["text"]


@pytest.mark.asyncio
async def test_greedy_tokens_in_floats_are_those_of_transformers(gemma: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40)
    options: dict[str, Any] = {"activation_quantization": "none", "max_model_len": 512}
    async with Engine(str(gemma), dtype="float32", **options) as engine:
        for one in REFERENCE:
            completion = await engine.generate(one["text"], greedy)
            assert list(completion.samples[0].token_ids) == one["completion"], one["text"]


@pytest.mark.asyncio
async def test_beyond_its_window_tokens_are_those_of_transformers_in_a_quarter_of_the_pages(
    gemma: Path,
) -> None:
    ids = list(model_files(gemma).tokenizer().encode(TEXT.read_text(encoding="utf-8")))[:1500]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"activation_quantization": "none", "max_model_len": 8448}
    async with Engine(str(gemma), dtype="float32", **options) as engine:
        for _ in range(2):  # the second finds the prompt in the cache
            completion = await engine.generate(ids, greedy)
            assert list(completion.samples[0].token_ids) == BEHIND_LICENSE
        held = []
        async for _ in engine.stream(
            (6 * ids)[:8188], msgspec.structs.replace(greedy, max_tokens=4)
        ):
            held.append(engine.stats().pages_held_by_requests)
    # One page of 16 tokens holds the 3 layers that see everything; the 15 others have a window.
    assert max(held) == 512 + 5 * 33
    assert max(held) <= 0.3 * 512 * 18 / 3


def test_turns_of_a_chat_are_special_tokens(gemma: Path, tmp_path: Path) -> None:
    """The file is of a model without a chat template; one that is given has the file's tokens."""
    files = model_files(gemma)
    assert files.chat_template() is None
    source = tmp_path / "chat.jinja"
    source.write_text(
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
        "<end_of_turn>\n{% endfor %}"
    )
    template = files.chat_template(source)
    assert template is not None
    text = template.render([{"role": "user", "content": "Hello"}])
    ids = list(files.tokenizer().encode(text, add_special_tokens=False))
    assert (ids[:2], ids[-2]) == ([2, 105], 106)


def logits_along(model: Path, *, integers: bool) -> list[torch.Tensor]:
    """Logits in float32 at each token of the reference's completions: [tokens, vocab] of each."""
    backend: Backend = backend_named("native")
    if not integers:
        backend.formats = msgspec.structs.replace(backend.formats, integer_bits=())
    decoder = load_model(model, dtype="float32", backend=backend, max_model_len=512)
    found: list[torch.Tensor] = []
    for place, one in enumerate(REFERENCE):
        ids = [*one["prompt"], *one["completion"]]
        rows = range(len(one["prompt"]) - 1, len(ids) - 1)
        found.append(PagedRun(decoder, num_pages=64).rows({str(place): ids}, list(rows)))
    return found


def test_integers_choose_another_token_only_where_two_are_nearly_as_likely(gemma: Path) -> None:
    """Each place of the reference's completions is compared, after the same tokens. Free generation
    isn't compared: its texts differ from the first different token on."""
    exact, found = (logits_along(gemma, integers=integers) for integers in (False, True))
    gaps: list[float] = []
    errors: list[float] = []
    others: list[float] = []
    for one, floats, integers in zip(REFERENCE, exact, found, strict=True):
        assert floats.argmax(1).tolist() == one["completion"]
        values, places = floats.topk(2)
        own = integers.gather(1, places)
        error = (own - values) @ torch.tensor([1.0, -1.0])
        gap = values[:, 0] - values[:, 1]
        other = integers.argmax(1) != floats.argmax(1)
        gaps += gap.tolist()
        errors += error.abs().tolist()
        others += gap[other].tolist()
    print(
        f"errors of the gap: rms {np.sqrt(np.mean(np.square(errors))):.3f}, "
        f"largest {max(errors):.3f}; {len(others)} of {len(gaps)} places have another token, gaps "
        f"there: {sorted(round(gap, 3) for gap in others)}; gaps: median {np.median(gaps):.2f}"
    )
    assert max(errors) <= STATED_GAP
    assert max(others, default=0.0) <= STATED_GAP
    assert len(others) < 0.1 * len(gaps)


def evaluated(model: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "aioserve", "evaluate", str(model), "--text", str(TEXT)]
    command += ["--context", "512", "--second-halves", "--json", "-", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    return json.loads(done.stdout)["models"][0]


def test_perplexity_is_that_of_llama_cpp_to_three_digits(gemma: Path) -> None:
    floats = evaluated(gemma, "--activation-quantization", "none", "--dtype", "float32")
    integers = evaluated(gemma)
    print(floats["perplexity"], integers["perplexity"])
    for one in (floats, integers):
        assert one["perplexity"]["value"] == pytest.approx(LLAMA_CPP_PERPLEXITY, rel=0.005)


def test_the_perplexity_of_llama_cpp_is_the_one_that_is_stated(gemma: Path) -> None:
    program = shutil.which("llama-perplexity")
    if program is None:
        pytest.skip("llama-perplexity is not installed")
    command = [program, "-m", str(gemma), "-f", str(TEXT), "-c", "512"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500)
    told = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    assert told is not None
    assert float(told[1]) == pytest.approx(LLAMA_CPP_PERPLEXITY, rel=0.005)
