"""Methods that compute a text first: their gain for a layer, and the models that they write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aioserve import Engine, SamplingParams
from aioserve.errors import ConfigError, ModelError
from aioserve.models import architecture
from aioserve.models.architecture import MLP, parts_of
from aioserve.models.files import model_files
from aioserve.models.quantization.calibrated.gptq_rounding import ErrorFeedback
from aioserve.models.quantization.calibrated.layer_inputs import second_moments, show_inputs
from aioserve.models.quantization.calibrated.methods import calibrated_method
from aioserve.models.quantization.calibrated.scaled import (
    ActivationAware,
    ScaleChoice,
    Scaled,
    Shared,
    SmoothQuant,
)
from aioserve.models.quantization.method import Method, OpenModel, RoundingMethod, Shapes
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.rounding import nearest_integers, round_to_integers
from aioserve.models.quantization.word_storing import AwqStoring, short_scales
from aioserve.models.stored import Floats, IntegerForm
from aioserve.ops import Linear
from aioserve.testing.random_model import write_random_model
from tests.models.quantization.checking import check_stands_for, logits_of
from tests.models.quantization.copying import give_a_tower
from tests.models.quantization.layouts import awq_decoded, gptq_decoded
from tests.models.quantization.writers import CONFIG
from tests.parity.tiny_models import ARCHITECTURES, CONFIGS, VOCAB_SIZE, write

CALIBRATED = [name for name in ARCHITECTURES if name not in ("gpt-oss", "gpt2")]

WIDE = CONFIG | {"intermediate_size": 128}
"""Config whose layers all have a multiple of 64 inputs."""
METHODS = ("gptq", "awq", "w8a8")
FORM = IntegerForm(4, 32, False)


def windows_of(vocab: int = 288, count: int = 6, length: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab, length) for _ in range(count)]


def method_of(name: str) -> Method:
    return calibrated_method(name, None if name == "w8a8" else 32, windows_of())


def correlated(seed: int, tokens: int, inputs: int) -> tuple[torch.Tensor, Floats]:
    """Make inputs [tokens, in] that lie mostly in in / 4 directions, and a weight [out, in]."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, inputs // 4)) @ rng.standard_normal((inputs // 4, inputs))
    x = mixed + 0.3 * rng.standard_normal((tokens, inputs))
    weight = rng.standard_normal((24, inputs)).astype(np.float32)
    return torch.from_numpy(x.astype(np.float32)), weight


def output_error(x: torch.Tensor, weight: Floats, given_back: Floats) -> float:
    return float(np.square(x.numpy() @ (given_back - weight).T).mean())


# -- GPTQ


@given(seed=st.integers(0, 2**32), inputs=st.sampled_from([32, 96, 256, 320]))
def test_error_feedback_loses_less_than_rounding(seed: int, inputs: int):
    x, weight = correlated(seed, 500, inputs)
    plain = round_to_integers(weight, FORM)
    feedback = ErrorFeedback(second_moments(x))
    values = feedback.nearest(weight, plain.scales, 32)
    assert values.min() >= -8
    assert values.max() <= 7
    given_back = values * np.repeat(plain.scales, 32, axis=1)
    fed_back, rounded = (output_error(x, weight, one) for one in (given_back, plain.dequantized()))
    assert fed_back < 0.6 * rounded


@given(seed=st.integers(0, 2**32))
def test_inputs_that_are_not_correlated_are_rounded_to_the_nearest(seed: int):
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((8, 96)).astype(np.float32)
    moments = torch.diag(torch.from_numpy(rng.uniform(0, 9, 96).astype(np.float32)))
    moments[5, 5] = 0  # an input that is always zero
    scales = round_to_integers(weight, FORM).scales
    values = ErrorFeedback(moments).nearest(weight, scales, 32)
    assert np.array_equal(values, nearest_integers(weight, scales, FORM))


def test_scales_follow_the_inputs_that_count():
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((50, 64)).astype(np.float32)
    importance = rng.exponential(1, 64).astype(np.float32) ** 3
    plain, weighted = (
        round_to_integers(weight, FORM, counts).dequantized() for counts in (None, importance)
    )
    errors = [(np.square(one - weight) * importance).sum() for one in (plain, weighted)]
    assert errors[1] < errors[0]


# -- AWQ and SmoothQuant


def with_outliers(seed: int) -> tuple[torch.Tensor, Floats]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((300, 64)).astype(np.float32)
    x[:, rng.choice(64, 3, replace=False)] *= 40
    return torch.from_numpy(x), rng.standard_normal((24, 64)).astype(np.float32)


@given(seed=st.integers(0, 2**32))
def test_awq_loses_less_where_some_inputs_are_large(seed: int):
    x, weight = with_outliers(seed)
    storing = AwqStoring(32)
    scales = ActivationAware(storing).scales(x, weight, "F32", np.asarray)
    aware = storing.once_rounded(weight * scales, "F32") / scales
    plain = storing.once_rounded(weight, "F32")
    assert output_error(x, weight, aware) < 0.75 * output_error(x, weight, plain)


def rounded_products(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiply in 8 bits, with a scale for each token and each output."""
    each = [np.abs(part).max(axis=1, keepdims=True) / 127 for part in (x, weight)]
    left, right = (np.rint(part / s) * s for part, s in zip((x, weight), each, strict=True))
    return left @ right.T


@given(seed=st.integers(0, 2**32))
def test_smoothquant_loses_less_where_some_inputs_are_large(seed: int):
    x, weight = with_outliers(seed)
    scales = SmoothQuant(0.5).scales(x, weight, "F32", np.asarray)
    exact = x.numpy() @ weight.T
    smooth = rounded_products(x.numpy() / scales, weight * scales)
    plain = rounded_products(x.numpy(), weight)
    assert np.square(smooth - exact).mean() < 0.2 * np.square(plain - exact).mean()


class Exact(RoundingMethod):
    """Method that keeps float32."""

    name = "exact"

    def config(self, ignored: list[str]) -> dict[str, object]:
        return {}

    def check(self, module: str, rows: int, columns: int) -> None: ...

    def parts(self, rows: int, columns: int, scales: str) -> Shapes:
        return {"weight": ("F32", (rows, columns))}

    def encoded(self, weight: Floats, scales: str) -> dict[str, np.ndarray]:
        return {"weight": np.ascontiguousarray(weight)}


class Random(ScaleChoice):
    everywhere = True

    def __init__(self) -> None:
        self._rng = np.random.default_rng(5)

    def scales(self, x: torch.Tensor, weight: Floats, precision: str, shared: Shared) -> Floats:
        return shared(self._rng.uniform(0.2, 5, weight.shape[1]).astype(np.float32))


@pytest.mark.parametrize("architecture", ["llama-biases", *CALIBRATED])
def test_scales_change_nothing_but_the_rounding(tmp_path: Path, architecture: str):
    model, copy = write(architecture, tmp_path / "model"), tmp_path / "copy"
    files = model_files(model)
    config = files.config()
    tensors = load_file(model / "model.safetensors")
    changed: dict[str, torch.Tensor] = {}

    def keep(
        tensor: architecture.Tensor, first: int, end: int, parts: Mapping[str, Floats]
    ) -> None:
        for array in parts.values():
            changed.setdefault(tensor.name, torch.empty(tensor.shape))[first:end] = (
                torch.from_numpy(array)
            )

    with files.weights(config) as weights:
        scaled = Scaled(Exact(), Random(), windows_of(config.vocab_size, length=20))
        vectors = scaled.encode(OpenModel(model, config, weights), keep)
    changed |= {tensor.name: torch.from_numpy(v).clone() for tensor, v in vectors.items()}
    others = [not torch.equal(one, tensors[name].float()) for name, one in changed.items()]
    # Some weights stay the same if blocks share a norm or have none, or if the MLP has no gate.
    first = config.layers[0]
    own_norms = first.mixer_norm is not None and first.feed_forward_norm is not None
    assert all(others) if own_norms and next(parts_of(first, MLP)).gated else any(others)
    shutil.copytree(model, copy)
    save_file(tensors | changed, copy / "model.safetensors")
    torch.testing.assert_close(
        logits_of(copy, "reference"), logits_of(model, "reference"), rtol=1e-3, atol=1e-4
    )


class Tiny(ScaleChoice):
    everywhere = False

    def scales(self, x: torch.Tensor, weight: Floats, precision: str, shared: Shared) -> Floats:
        return shared(np.full(weight.shape[1], 1e-5, np.float32))


def test_a_norm_that_float16_can_not_hold_stays_as_it_is(tmp_path: Path):
    model = write("llama", tmp_path / "model")
    halves = {name: t.half() for name, t in load_file(model / "model.safetensors").items()}
    norm = halves["model.layers.0.input_layernorm.weight"]
    norm[0], norm[1:] = 20.0, 0.25
    save_file(halves, model / "model.safetensors")
    files = model_files(model)
    config = files.config()
    with files.weights(config) as weights:
        scaled = Scaled(Exact(), Tiny(), windows_of(config.vocab_size, length=20))
        vectors = scaled.encode(OpenModel(model, config, weights), lambda *_: None)
    assert vectors
    assert all(np.isfinite(vector).all() for vector in vectors.values())
    new = next(v for t, v in vectors.items() if t.name.endswith("layers.0.input_layernorm.weight"))
    assert new[0] == 20
    assert (new[1:] > 1e4).all()


# -- the pass over the text


def test_each_layer_is_shown_what_goes_into_it_for_every_token(tmp_path: Path):
    model = write_random_model(tmp_path / "model", CONFIG, dtype="float32")
    windows = windows_of(count=3)
    shown: list[tuple[architecture.Linear, torch.Tensor]] = []

    def visit(described: architecture.Linear, layer: Linear, x: torch.Tensor) -> Linear:
        shown.append((described, x.clone()))
        return layer

    show_inputs(model, windows, visit)
    assert [described for described, _ in shown] == list(model_files(model).config().linears)
    assert all(len(x) == 120 for _, x in shown)
    together = [x for _, x in shown]
    for i, window in enumerate(windows):
        shown.clear()
        show_inputs(model, [window], visit)
        for whole, (_, alone) in zip(together, shown, strict=True):
            torch.testing.assert_close(whole[40 * i : 40 * (i + 1)], alone)


def test_a_layer_gets_what_the_rounded_layers_before_it_make(tmp_path: Path):
    model = write_random_model(tmp_path / "model", CONFIG, dtype="float32")
    seen: list[float] = []

    def visit(described: architecture.Linear, layer: Linear, x: torch.Tensor) -> Linear:
        seen.append(float(x.abs().sum()))
        return layer

    class Zero:
        def __init__(self, layer: Linear) -> None:
            self._layer = layer

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(self._layer(x))

    def silence(described: architecture.Linear, layer: Linear, x: torch.Tensor) -> Linear:
        visit(described, layer, x)
        return layer if len(seen) != 1 else Zero(layer)  # type: ignore[return-value]

    show_inputs(model, windows_of(), visit)
    plain = seen.copy()
    seen.clear()
    show_inputs(model, windows_of(), silence)
    assert seen[0] == plain[0]
    assert seen[1] == 0
    assert all(one != other for one, other in zip(seen[2:], plain[2:], strict=True))


def test_a_model_that_computes_no_numbers_is_named(tmp_path: Path):
    model = write_random_model(tmp_path / "model", WIDE, dtype="float32")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = float("inf")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"NaN or infinity before model\.layers\.1\.self_attn"):
        write_quantized_copy(model, tmp_path / "copy", method_of("gptq"))
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


# -- whole copies


def floats_of(copy: Path, to: Path) -> Path:
    """Write the float model of the weights that the copy's reader returns."""
    files = model_files(copy)
    config = files.config()
    plain = load_file(copy / "model.safetensors")
    with files.weights(config) as stored:
        for described in config.linears:
            for tensor in described.weights:
                module = tensor.name.removesuffix("weight")
                for name in [name for name in plain if name.startswith(module)]:
                    if name != module + "bias":
                        plain.pop(name)
                plain[tensor.name] = torch.from_numpy(stored[tensor].floats())
    shutil.copytree(copy, to, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: one.float() for name, one in plain.items()}, to / "model.safetensors")
    said = json.loads((to / "config.json").read_text())
    said.pop("quantization_config")
    (to / "config.json").write_text(json.dumps(said | {"dtype": "float32"}))
    return to


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copy_is_near_the_model_and_computes_its_own_weights(
    tmp_path: Path, name: str, dtype: str
):
    model = write_random_model(tmp_path / "model", WIDE, dtype=dtype)
    write_quantized_copy(model, tmp_path / "copy", method_of(name))
    check_stands_for(tmp_path / "copy", floats_of(tmp_path / "copy", tmp_path / "floats"))
    ours, plain = (logits_of(tmp_path / one, "reference") for one in ("copy", "model"))
    assert (ours - plain).square().mean() < 0.1 * plain.square().mean()


GROUPS_FIT = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("architecture", ["llama-biases", *CALIBRATED])
def test_every_architecture_is_copied(tmp_path: Path, name: str, architecture: str):
    config = CONFIGS[architecture] | GROUPS_FIT
    model = write_random_model(tmp_path / "model", config, dtype="float32")
    method = calibrated_method(
        name, None if name == "w8a8" else 32, windows_of(VOCAB_SIZE, length=20)
    )
    write_quantized_copy(model, tmp_path / "copy", method)
    check_stands_for(tmp_path / "copy", floats_of(tmp_path / "copy", tmp_path / "floats"))
    ours, plain = (logits_of(tmp_path / one, "reference") for one in ("copy", "model"))
    assert (ours - plain).square().mean() < 0.3 * plain.square().mean()


@pytest.mark.parametrize("name", METHODS)
def test_layers_that_can_not_be_stored_so_are_named(tmp_path: Path, name: str):
    windows = windows_of(VOCAB_SIZE, length=20)
    method = calibrated_method(name, None if name == "w8a8" else 32, windows)
    with pytest.raises(ConfigError, match=r"model must .*\.attn\.c_attn\.weight as \[in, out\]"):
        write_quantized_copy(write("gpt2", tmp_path / "gpt2"), tmp_path / "copy", method)
    if name == "w8a8":
        return
    model = write("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"group_size must divide the inputs .*q_proj has 48"):
        write_quantized_copy(model, tmp_path / "copy", method)
    assert {one.name for one in tmp_path.iterdir()} == {"gpt2", "model"}


@pytest.mark.parametrize("name", METHODS)
def test_towers_for_images_stay_and_are_named(tmp_path: Path, name: str):
    config = CONFIGS["gemma3"] | GROUPS_FIT
    model = write_random_model(tmp_path / "model", config, dtype="float32")
    tower = {"vision_tower.fc1.weight": torch.randn(6, 4), "vision_tower.fc1.bias": torch.randn(6)}
    give_a_tower(model, tower)
    windows = windows_of(VOCAB_SIZE, length=20)
    write_quantized_copy(
        model,
        tmp_path / "copy",
        calibrated_method(name, None if name == "w8a8" else 32, windows),
    )
    copied = load_file(tmp_path / "copy/model.safetensors")
    assert all(torch.equal(copied[name], tensor) for name, tensor in tower.items())
    assert "vision_tower" in json.dumps(
        json.loads((tmp_path / "copy/config.json").read_text())["quantization_config"]
    )
    files = model_files(tmp_path / "copy")
    files.weights(files.config()).close()
    assert logits_of(tmp_path / "copy").isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_the_same_text_gives_the_same_bytes(tmp_path: Path, name: str):
    model = write_random_model(tmp_path / "model", WIDE, dtype="bfloat16")
    for out in ("one", "two"):
        write_quantized_copy(model, tmp_path / out, method_of(name))
    one, two = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two


@pytest.mark.asyncio
@pytest.mark.parametrize("name", METHODS)
async def test_an_engine_gives_the_tokens_of_the_float_model(tmp_path: Path, name: str):
    model = write_random_model(tmp_path / "model", WIDE, dtype="bfloat16")
    write_quantized_copy(model, tmp_path / "copy", method_of(name))
    floats = floats_of(tmp_path / "copy", tmp_path / "floats")
    answers = []
    for directory in (tmp_path / "copy", floats):
        async with Engine(directory, backend="reference", dtype="float32", num_pages=16) as engine:
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            answer = await engine.generate([5, 9, 200, 31, 77], params)
            answers.append(answer.token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", METHODS)
def test_progress_reaches_all_bytes_and_an_interrupted_run_leaves_nothing(
    tmp_path: Path, name: str
):
    model = write_random_model(tmp_path / "model", WIDE, dtype="bfloat16")
    calls: list[tuple[int, int]] = []
    written = write_quantized_copy(
        model, tmp_path / "copy", method_of(name), progress=lambda *counts: calls.append(counts)
    )
    assert calls == sorted(set(calls))
    assert calls[-1] == (written.read_bytes, written.read_bytes)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantized_copy(model, tmp_path / "half", method_of(name), progress=interrupt)
    assert {one.name for one in tmp_path.iterdir()} == {"model", "copy"}


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_others_read_the_same_numbers(tmp_path: Path, name: str):
    model = write_random_model(tmp_path / "model", WIDE, dtype="bfloat16")
    write_quantized_copy(model, tmp_path / "copy", method_of(name))
    files, parts = model_files(tmp_path / "copy"), load_file(tmp_path / "copy/model.safetensors")
    config = files.config()
    with files.weights(config) as stored:
        for tensor in (one for layer in config.linears for one in layer.weights):
            module = tensor.name.removesuffix("weight")
            mine = {key[len(module) :]: v for key, v in parts.items() if key.startswith(module)}
            theirs = gptq_decoded(mine) if name == "gptq" else awq_decoded(mine, 32)
            assert np.array_equal(stored[tensor].floats(), theirs.numpy()), tensor.name


def test_scales_beyond_float16_and_odd_sizes_are_refused(tmp_path: Path):
    scales = np.array([1 + 2**-9, 3], np.float32)
    assert np.array_equal(short_scales(scales, "BF16"), [1, 3])
    assert np.array_equal(short_scales(scales, "F32"), scales)
    odd = CONFIG | {"num_key_value_heads": 1, "head_dim": 12, "num_attention_heads": 4}
    model = write_random_model(tmp_path / "model", odd, dtype="float32")
    for name in ("gptq", "awq"):
        with pytest.raises(ConfigError, match=r"a multiple of 8 outputs .*k_proj has 12"):
            write_quantized_copy(model, tmp_path / "copy", method_of(name))
    with pytest.raises(ConfigError, match="method must be gptq, awq or w8a8 with a text"):
        calibrated_method("int8", None, windows_of())
    with pytest.raises(ConfigError, match="group_size must be 32, 64, 128, got 48"):
        calibrated_method("awq", 48, windows_of())
