"""The choice of kernels for attention of prompts, and an engine's report of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve import ConfigError, Engine
from aioserve.config import EngineConfig
from aioserve.execution.gpu import attention_choice
from aioserve.execution.gpu.attention_choice import (
    AttentionChoice,
    choose_attention,
    trial_prompts,
)
from aioserve.execution.gpu.failures import DeviceFailedError
from aioserve.execution.loading import cuda
from aioserve.formats.weights import PLAIN_FLOATS
from aioserve.models.decoder import Decoder
from aioserve.models.files import model_files
from aioserve.models.loader import make_decoder
from aioserve.models.reading import WeightReading
from aioserve.ops.gpu import flashinfer_attention
from aioserve.ops.gpu.backend import CudaBackend
from aioserve.testing.random_model import write_random_model
from tests.execution.gpu.assembled import on_host
from tests.execution.gpu.host_device import HostDevice
from tests.execution.gpu.test_decoder_steps import OPTIONS, answers
from tests.ops.gpu import fake_flashinfer
from tests.parity.tiny_models import CONFIGS

# Windows in every other layer, and soft caps.
GEMMA = CONFIGS["gemma2"] | {"head_dim": 64, "num_hidden_layers": 2}
SMALL: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "page_size": 4}


def decoder_of(path: Path, backend: CudaBackend) -> Decoder:
    with WeightReading(model_files(path), formats=PLAIN_FLOATS) as reading:
        return make_decoder(reading.read(), backend)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma2")
    return write_random_model(path, GEMMA, seed=0, dtype="float16")


@pytest.fixture(scope="module")
def decoder(gemma: Path) -> Decoder:
    return decoder_of(gemma, CudaBackend("cpu"))


def clock(flashinfer: float, triton: float) -> Any:
    """Make a clock for rounds of these durations, the first of them longer."""

    def times() -> Iterator[float]:
        now = 0.0
        for slower in (50.0, 0.01, 0.0, 0.002, 0.5):
            for seconds in (flashinfer, triton):
                yield now
                now += seconds + slower
                yield now

    return functools.partial(next, times())


class Device(HostDevice):
    """Gives every error the meaning that it is told to."""

    def __init__(self, meaning: Exception | None = None) -> None:
        super().__init__()
        self._meaning = meaning

    def meaning_of(self, error: Exception) -> Exception:
        return self._meaning or error


def choose(
    decoder: Decoder,
    *,
    module: Any = fake_flashinfer,
    installed: bool = True,
    seconds: tuple[float, float] = (1.0, 2.0),
    device: Device | None = None,
    **options: Any,
) -> AttentionChoice:
    def load() -> Any:
        if isinstance(module, Exception):
            raise module
        return module

    backend = decoder.backend
    assert isinstance(backend, CudaBackend)
    device = device or Device()
    with device.within():
        return choose_attention(
            decoder,
            EngineConfig(**(SMALL | options)),
            backend,
            device,
            max_model_len=64,
            installed=lambda: installed,
            load=load,
            clock=clock(*seconds),
        )


@pytest.mark.more
def test_the_faster_one_is_used_and_both_times_are_told(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    choice = choose(decoder, seconds=(1.0, 2.0))
    assert choice.used == "flashinfer", choice.why
    assert choice.prompts is not None
    assert choice.why == (
        "the prompts of a step of 21 tokens took 1000.000 ms in all layers with FlashInfer "
        "0.0.fake, and 2000.000 ms with Triton"
    )
    assert choice.why in caplog.text
    slower = choose(decoder, seconds=(2.0, 1.0))
    assert (slower.prompts, slower.used) == (None, "triton")
    assert "2000.000 ms in all layers with FlashInfer 0.0.fake, and 1000.000 ms" in slower.why


@pytest.mark.more
def test_what_is_hardly_faster_is_left(decoder: Decoder) -> None:
    assert choose(decoder, seconds=(0.96, 1.0)).used == "triton"
    assert choose(decoder, seconds=(0.94, 1.0)).used == "flashinfer"


def test_what_is_asked_for_is_used_however_fast_it_is(decoder: Decoder) -> None:
    asked = choose(decoder, seconds=(2.0, 1.0), attention="flashinfer")
    assert asked.used == "flashinfer", asked.why
    assert asked.prompts is not None
    triton = choose(decoder, module=AssertionError("loaded"), attention="triton")
    assert triton == (None, "attention='triton' is asked for")
    assert triton.used == "triton"


class WrongWindow(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    def plan(self, *args: Any, window_left: int = -1, **options: Any) -> None:
        super().plan(*args, window_left=max(window_left - 1, -1), **options)


class Zeros(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    def run(self, *args: Any, **options: Any) -> torch.Tensor:
        return options["out"].zero_()


class Nan(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    def run(self, *args: Any, **options: Any) -> torch.Tensor:
        return super().run(*args, **options)[-1:].fill_(float("nan"))


class NoCompiler(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    def plan(self, *args: Any, **options: Any) -> None:
        raise RuntimeError("Could not find nvcc")


def module_of(wrapper: type) -> Any:
    return SimpleNamespace(__version__="9.9", BatchPrefillWithPagedKVCacheWrapper=wrapper)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"installed": False}, "FlashInfer isn't installed"),
        ({"module": ImportError("no cutlass")}, "FlashInfer failed: ImportError: no cutlass"),
        (
            {"module": module_of(NoCompiler)},
            "FlashInfer 9.9 failed: RuntimeError: Could not find nvcc",
        ),
        (
            {"module": SimpleNamespace(__version__="0.1")},
            "FlashInfer 0.1 failed: AttributeError: .*BatchPrefillWithPagedKVCacheWrapper",
        ),
        (
            {"module": module_of(WrongWindow)},
            r"FlashInfer 9.9: its results differ from Triton's by up to .* \(window 11, soft cap ",
        ),
        ({"module": module_of(Zeros)}, "FlashInfer 9.9: its results differ from Triton's by up to"),
        ({"module": module_of(Nan)}, "FlashInfer 9.9: its results differ .* by up to nan"),
        (
            {"max_num_batched_tokens": 1, "max_num_seqs": 1},
            "a step has no room for a prompt of two tokens",
        ),
    ],
    ids=["absent", "import", "compiler", "old", "window", "zeros", "nan", "tokens"],
)
def test_what_cannot_be_used_is_triton_s_and_an_error_where_it_is_asked_for(
    decoder: Decoder, given: dict[str, Any], reason: str
) -> None:
    choice = choose(decoder, **given)
    assert (choice.prompts, choice.used) == (None, "triton")
    with pytest.raises(
        ConfigError, match=f"^attention='flashinfer' can't be used: {reason}"
    ) as raised:
        choose(decoder, attention="flashinfer", **given)
    assert str(raised.value) == f"attention='flashinfer' can't be used: {choice.why}"
    assert raised.value.argument == "attention"


def test_a_model_that_it_does_not_take_is_triton_s(tmp_path: Path) -> None:
    write_random_model(tmp_path, CONFIGS["qwen3"], seed=0, dtype="bfloat16")
    choice = choose(decoder_of(tmp_path, CudaBackend("cpu")))
    assert choice.used == "triton"
    assert choice.why == (
        "FlashInfer: it has kernels for heads of 64, 128, 256 dimensions, and the model's have 16"
    )


def test_a_device_that_fails_meanwhile_is_no_reason_to_go_on(decoder: Decoder) -> None:
    broken = Device(DeviceFailedError("cuda:0: an illegal memory access"))
    with pytest.raises(DeviceFailedError, match="illegal memory access"):
        choose(decoder, module=module_of(NoCompiler), device=broken)


def test_the_random_numbers_of_the_program_stay_its_own(decoder: Decoder) -> None:
    before = torch.random.get_rng_state()
    assert choose(decoder).used == "flashinfer"
    assert torch.equal(torch.random.get_rng_state(), before)


@given(max_tokens=st.integers(1, 10_000), max_model_len=st.integers(2, 10_000))
def test_prompts_of_a_trial_fit_a_step(max_tokens: int, max_model_len: int) -> None:
    prompts = trial_prompts(max_tokens, max_model_len)
    assert sum(tokens for tokens, _ in prompts) <= max_tokens
    assert all(1 < tokens <= context <= max_model_len for tokens, context in prompts)
    assert bool(prompts) == (max_tokens > 1 and max_model_len > 2)
    if max_tokens >= 100 and max_model_len >= 2 * max_tokens:
        assert prompts[0][0] < prompts[0][1]
        assert len(prompts) == 5


@pytest.mark.more
@pytest.mark.asyncio
async def test_an_engine_uses_what_was_chosen_and_dump_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_random_model(tmp_path, GEMMA, seed=0, dtype="float32")
    # Only in float32 can tokens be compared.
    monkeypatch.setattr(flashinfer_attention, "DTYPES", (torch.float32,))
    monkeypatch.setattr(attention_choice, "ROUNDINGS", 100)
    plans: list[int] = []

    class Counted(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args: Any, **options: Any) -> None:
            super().plan(*args, **options)
            plans.append(len(args[0]) - 1)

    chosen = functools.partial(
        choose_attention,
        installed=lambda: True,
        load=lambda: module_of(Counted),
        clock=clock(1.0, 2.0),
    )
    reference = Engine(path, backend="reference", dtype="float32", **OPTIONS)
    async with reference:
        expected = await answers(reference, drawn=False)
    monkeypatch.setattr(cuda, "choose_attention", chosen)
    engine = Engine(on_host(path), dtype="float32", graph_sizes=(2,), **OPTIONS)
    async with engine:
        plans.clear()
        assert await answers(engine, drawn=False) == expected
        dumped = engine.dump()["model"]
    assert plans
    assert dumped["attention"]["prompts"] == "flashinfer"
    assert dumped["attention"]["decodes"] == "triton"
    assert "1000.000 ms in all layers with FlashInfer 9.9" in dumped["attention"]["why"]
    assert dumped["loading_seconds"]["attention"] > 0

    monkeypatch.undo()
    plain = Engine(on_host(path), dtype="float32", graph_sizes=(), attention="triton", **OPTIONS)
    async with plain:
        assert plain.dump()["model"]["attention"] == {
            "prompts": "triton",
            "decodes": "triton",
            "why": "attention='triton' is asked for",
        }


def test_flashinfer_is_not_used_for_a_model_whose_layers_have_sinks(tmp_path: Path):
    config = CONFIGS["gpt-oss"] | {"head_dim": 64}
    path = write_random_model(tmp_path, config, dtype="float16")
    decoder = decoder_of(path, CudaBackend("cpu"))
    choice = choose(decoder)
    assert choice.prompts is None
    assert "its kernels know no sinks" in choice.why
    with pytest.raises(ConfigError, match=r"attention='flashinfer' can't be used: .* no sinks"):
        choose(decoder, attention="flashinfer")
