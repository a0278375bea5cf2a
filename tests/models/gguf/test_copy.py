"""`write_gguf`: the file is the model that it was made from, and the gguf package reads it."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aioserve import Engine, SamplingParams
from aioserve.errors import ConfigError, WeightsError
from aioserve.models.architecture import MLP, Architecture, parts_of
from aioserve.models.config import DecoderConfig
from aioserve.models.files import model_files
from aioserve.models.gguf import settings
from aioserve.models.gguf.copy import write_gguf
from aioserve.models.gguf.mixes import MIXES
from aioserve.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from aioserve.models.gguf.settings import WRITTEN
from aioserve.models.gguf.weights import norm_offset
from aioserve.models.quantization.quantized_copy import write_quantized_copy
from aioserve.models.quantization.storing import method_named
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.test_model import NAMES, NOT_WRITTEN, WIDE, written
from tests.models.gguf.vocabularies import TEXT, write_byte_level
from tests.models.quantization.checking import logits_of
from tests.models.quantization.copying import fill_the_disk, give_a_tower
from tests.parity.tiny_models import CONFIGS

HALF_A_STEP_AT_ONE = 2**-24
"""Largest error of a norm's weight in a file that has 1 added to it, as for Gemma."""
ERRORS = {
    "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.01, "Q6_K": 0.03, "Q5_K_M": 0.06, "Q5_1": 0.06,
    "Q5_0": 0.07, "Q4_K_M": 0.11, "Q4_1": 0.11, "Q4_0": 0.13,
}  # fmt: skip
"""Largest error of weights in each type of file, relative, root mean square."""


def copied(directory: Path, name: str = "BF16", **options: Any) -> Path:
    file = directory.parent / f"{directory.name}-{name}.gguf"
    write_gguf(directory, file, MIXES[name], **options)
    return file


def tell_apart(found: DecoderConfig, expected: DecoderConfig) -> list[str]:
    return [
        field.name
        for field in fields(Architecture)
        if getattr(found, field.name) != getattr(expected, field.name)
    ]


def is_writable(name: str) -> bool:
    """True for models that can be written. Mixtures of experts are only read from GGUF files."""
    return CONFIGS[name]["architectures"][0] in WRITTEN


WRITABLE = sorted(filter(is_writable, NAMES))


def test_a_mixture_is_refused_by_name(tmp_path: Path) -> None:
    directory = written("qwen3-moe", tmp_path / "hf")
    with pytest.raises(ConfigError, match="to be written as GGUF, got Qwen3MoeForCausalLM"):
        copied(directory, "Q8_0")


@pytest.mark.parametrize("name", WRITABLE)
def test_a_file_of_floats_is_the_model_bit_for_bit(tmp_path: Path, name: str):
    directory = written(name, tmp_path / "hf", dtype="bfloat16")
    file = copied(directory)
    expected, found = model_files(directory).config(), model_files(file).config()
    if name == "llama3":  # the file has rounded divisors of its frequencies
        found = replace(found, layers=expected.layers)
    assert tell_apart(found, expected) == []
    assert found.eos_token_ids == expected.eos_token_ids
    files, plain = model_files(file), model_files(directory)
    with files.weights(files.config()) as ours, plain.weights(expected) as theirs:
        for tensor in expected.required:
            lost = np.abs(ours[tensor].floats() - theirs[tensor].floats()).max()
            assert lost <= norm_offset(expected, tensor) * HALF_A_STEP_AT_ONE, tensor.name
    for backend in ("native", "reference"):
        one, other = (logits_of(path, backend) for path in (file, directory))
        if name == "llama3":
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
        else:
            assert torch.equal(one, other)


def test_an_architecture_that_files_cant_tell_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory = written("gemma2", tmp_path / "hf")
    rest = {name: family for name, family in WRITTEN.items() if family != "gemma2"}
    monkeypatch.setattr(settings, "WRITTEN", rest)
    with pytest.raises(ConfigError, match="got Gemma2ForCausalLM"):
        copied(directory)
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("gemma2", {"query_pre_attn_scalar": 24}, "its layers would become others"),
        ("gemma2", {"attn_logit_softcapping": None}, "its layers would become others"),
        ("gemma2", {"final_logit_softcapping": None}, "its final_soft_cap would become others"),
        ("gemma2", {"tie_word_embeddings": False}, "must have no output layer of its own"),
        (
            "gemma3",
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            "its layers would become others",
        ),
        ("gemma3", {"rms_norm_eps": 1.23456789e-6}, "its layers would become others"),
        ("gpt2", {"scale_attn_weights": False}, "its layers would become others"),
    ],
)
def test_a_setting_that_files_cant_tell_is_refused_by_name(
    tmp_path: Path, name: str, changed: dict[str, Any], says: str
):
    directory = written(name, tmp_path / "hf", **changed)
    with pytest.raises(ConfigError, match=says):
        copied(directory)
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gemma3", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 3}),
        ("gemma3", {"final_logit_softcapping": 5.0, "rope_scaling": None}),
        ("gemma3", {"tie_word_embeddings": False}),
        ("gemma2", {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0}),
        ("phi3", {"sliding_window": None, "tie_word_embeddings": True}),
        ("phi3-longrope", {"original_max_position_embeddings": 256}),
        ("gpt2", {"n_inner": 100, "tie_word_embeddings": False}),
    ],
)
def test_settings_of_each_family_are_told(tmp_path: Path, name: str, changed: dict[str, Any]):
    directory = written(name, tmp_path / "hf", dtype="bfloat16", **changed)
    file = copied(directory)
    found, expected = model_files(file).config(), model_files(directory).config()
    assert tell_apart(found, expected) == []
    assert torch.equal(logits_of(file, "reference"), logits_of(directory, "reference"))


def test_of_a_model_that_sees_its_language_model_is_written(tmp_path: Path):
    directory = written("gemma3", tmp_path / "hf", dtype="bfloat16")
    expected = copied(directory).read_bytes()
    seeing = shutil.copytree(directory, tmp_path / "seeing")
    give_a_tower(seeing, {"vision_tower.fc1.weight": torch.randn(6, 4)})
    assert model_files(seeing).config().architecture == "Gemma3ForConditionalGeneration"
    assert copied(seeing).read_bytes() == expected


@pytest.mark.parametrize("name", [name for name in NOT_WRITTEN if is_writable(name)])
def test_a_setting_without_a_place_is_refused_by_name(tmp_path: Path, name: str):
    directory = written(name, tmp_path / "hf")
    with pytest.raises(ConfigError, match="its layers would become others"):
        copied(directory)


def floats_of(file: Path, directory: Path, to: Path) -> Path:
    """Write the float model of the weights that the file's reader returns."""
    files = model_files(file)
    config = files.config()
    with files.weights(config) as stored:
        tensors = {
            tensor.name: torch.from_numpy(stored[tensor].floats()).reshape(tensor.shape)
            for tensor in (*config.required, config.head)
            if tensor in stored
        }
    shutil.copytree(directory, to, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, to / "model.safetensors")
    said = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(said | {"dtype": "float32"}))
    return to


@pytest.mark.sampled(3)
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", MIXES)
async def test_each_type_gives_the_tokens_of_its_weights_and_is_near_the_model(
    tmp_path: Path, kind: str
):
    family = "llama" if kind.startswith("Q4") else "qwen3"
    config = {**CONFIGS[family], **WIDE}
    directory = write_random_model(tmp_path / "hf", config, dtype="bfloat16")
    file = copied(directory, kind)
    floats = floats_of(file, directory, tmp_path / "floats")
    plain, rounded = (load_file(one / "model.safetensors") for one in (directory, floats))
    for name, tensor in rounded.items():
        off = (tensor - plain[name].float()).square().mean().sqrt()
        assert off <= ERRORS[kind] * plain[name].float().square().mean().sqrt(), name
    assert torch.equal(logits_of(file, "reference"), logits_of(floats, "reference"))
    answers = []
    for path in (file, floats):
        async with Engine(path, backend="reference", dtype="float32", num_pages=16) as engine:
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            answers.append((await engine.generate([5, 9, 20, 31, 7], params)).token_ids)
    assert answers[0] == answers[1]


@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_package_reads_what_was_written(tmp_path: Path):
    directory = write_random_model(tmp_path / "hf", {**CONFIGS["llama"], **WIDE}, dtype="bfloat16")
    reader = gguf.GGUFReader(copied(directory, "Q4_K_M"))
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert reader.fields["llama.block_count"].contents() == 2
    forms = {one.name: one.tensor_type.name for one in reader.tensors}
    assert forms["output_norm.weight"] == "F32"
    assert forms["blk.0.attn_q.weight"] == "Q4_K"
    assert forms["blk.0.attn_v.weight"] == "Q4_K"
    assert forms["blk.1.ffn_down.weight"] == "Q6_K"
    files = model_files(tmp_path / "hf-Q4_K_M.gguf")
    config = files.config()
    with files.weights(config) as ours:
        stored = ours[next(parts_of(config.layers[1], MLP)).down.weights[0]]
        theirs = next(one for one in reader.tensors if one.name == "blk.1.ffn_down.weight")
        values = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        assert np.array_equal(stored.floats(), values)
    assert list(reader.fields["tokenizer.ggml.tokens"].contents())


def test_layers_get_more_bits_as_the_mixture_says():
    mix = MIXES["Q4_K_M"]
    down = [mix.form("ffn_down", 512, layer, 32, is_output=False).name for layer in range(32)]
    assert [i for i, name in enumerate(down) if name == "Q6_K"] == [
        0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31,
    ]  # fmt: skip
    assert mix.form("attn_q", 512, 0, 32, is_output=False).name == "Q4_K"
    assert mix.form("output.weight", 512, None, 32, is_output=True).name == "Q6_K"
    shorter = {
        columns: [
            mix.form(name, columns, 0, 32, is_output=False).name for name in ("attn_q", "attn_v")
        ]
        for columns in (256, 96, 40)
    }
    assert shorter == {256: ["Q4_K", "Q6_K"], 96: ["Q5_0", "Q8_0"], 40: ["F16", "F16"]}


# -- tokenizers


def with_tokenizer(tmp_path: Path, change: Any) -> Path:
    directory = write_random_model(tmp_path / "hf", CONFIGS["qwen3"], dtype="bfloat16")
    write_byte_level(directory)
    file = directory / "tokenizer.json"
    said = json.loads(file.read_text())
    change(said)
    file.write_text(json.dumps(said))
    return directory


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_each_way_to_cut_text_is_told(tmp_path: Path, name: str):
    rules = PRE_TOKENIZERS[name]

    def change(said: dict[str, Any]) -> None:
        said["pre_tokenizer"] = rules.pre_tokenizer()
        said["normalizer"] = {"type": "NFC"} if rules.composes else None
        said["model"]["ignore_merges"] = rules.ignore_merges

    directory = with_tokenizer(tmp_path, change)
    ours, theirs = (model_files(path).tokenizer() for path in (copied(directory), directory))
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.decode(ours.encode(TEXT)) == TEXT


def test_marks_of_the_model_are_told(tmp_path: Path):
    def change(said: dict[str, Any]) -> None:
        marks = [("<|im_start|>", 285, True), ("<|im_end|>", 286, True), ("<tool>", 287, False)]
        vocab = said["model"]["vocab"]
        for token in [token for token, token_id in vocab.items() if token_id >= 285]:
            del vocab[token]
        said["model"]["merges"] = [
            pair
            for pair in said["model"]["merges"]
            if "".join(pair if isinstance(pair, list) else pair.split(" ")) in vocab
        ]
        said["added_tokens"] = [
            {
                "id": token_id, "content": token, "special": special, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for token, token_id, special in marks
        ]  # fmt: skip

    directory = with_tokenizer(tmp_path, change)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    ours, theirs = (model_files(path) for path in (copied(directory), directory))
    text = "a<|im_start|>b<tool> c<|im_end|>"
    assert ours.tokenizer().encode(text) == theirs.tokenizer().encode(text)
    assert ours.tokenizer().special_names == theirs.tokenizer().special_names
    templates = ours.chat_template(), theirs.chat_template()
    assert templates[0] is not None
    assert templates[1] is not None
    assert templates[0].source == templates[1].source
    assert templates[0].for_tools(True).source == templates[1].for_tools(True).source
    assert templates[0].for_tools(True).source == "{{ tools }}"
    assert set(ours.config().eos_token_ids) >= set(theirs.config().eos_token_ids)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda said: said.update(pre_tokenizer={"type": "Whitespace"}), "cut text as one of"),
        (lambda said: said.update(normalizer={"type": "NFKC"}), "cut text as one of"),
        (
            lambda said: said.update(
                added_tokens=[
                    {"id": 3, "content": "<x>", "special": True, "lstrip": True, "rstrip": False,
                     "single_word": False, "normalized": False}
                ]
            ),
            "<x>' has rules",
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_that_no_file_can_tell_is_refused(tmp_path: Path, change: Any, named: str):
    directory = with_tokenizer(tmp_path, change)
    with pytest.raises(ConfigError, match=named):
        copied(directory)
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


# -- the target path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "hf", CONFIGS["qwen3"], dtype="bfloat16")


def test_what_is_there_is_never_overwritten(tmp_path: Path, model: Path):
    (tmp_path / "there.gguf").write_text("mine")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere")
    for out, named in (
        (tmp_path / "there.gguf", "must be a file that is not there yet"),
        (tmp_path / "link.gguf", "must be a file that is not there yet"),
        (tmp_path / "model", "must end with .gguf"),
        (tmp_path / "no/such.gguf", "must be in a directory that is there"),
    ):
        with pytest.raises(ConfigError, match=named) as refusal:
            write_gguf(model, out, MIXES["Q8_0"])
        assert refusal.value.argument == "out"
    assert (tmp_path / "there.gguf").read_text() == "mine"

    def take(done: int, total: int) -> None:
        (tmp_path / "late.gguf").write_text("mine")

    with pytest.raises(ConfigError, match=r"late\.gguf can't be written: File exists"):
        write_gguf(model, tmp_path / "late.gguf", MIXES["Q8_0"], progress=take)
    assert (tmp_path / "late.gguf").read_text() == "mine"
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"hf", "there.gguf", "link.gguf", "late.gguf"}


def test_models_that_are_quantised_are_refused(tmp_path: Path, model: Path):
    write_quantized_copy(model, tmp_path / "int8", method_named("int8", None))
    with pytest.raises(ConfigError, match="are quantised already"):
        write_gguf(tmp_path / "int8", tmp_path / "x.gguf", MIXES["Q8_0"])
    with pytest.raises(ConfigError, match="got the GGUF file"):
        write_gguf(copied(model), tmp_path / "x.gguf", MIXES["Q8_0"])


def test_progress_reaches_all_bytes_and_an_interrupted_run_leaves_nothing(
    tmp_path: Path, model: Path
):
    calls: list[tuple[int, int]] = []
    copied(model, progress=lambda *counts: calls.append(counts))
    assert calls == sorted(set(calls))
    assert calls[-1][0] == calls[-1][1]
    before = {one.name for one in tmp_path.iterdir()}

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copied(model, "Q8_0", progress=interrupt)
    assert {one.name for one in tmp_path.iterdir()} == before


@pytest.mark.parametrize("number", [0, 5])
def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    fill_the_disk(monkeypatch, number)
    with pytest.raises(WeightsError, match="can't be written: No space left"):
        copied(model)
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


def test_a_tensor_that_holds_nan_is_named(tmp_path: Path, model: Path):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][1, 2] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(WeightsError, match=r"layers\.0\.mlp\.up_proj\.weight: NaN and infinity"):
        copied(model, "Q8_0")
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]
