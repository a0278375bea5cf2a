"""GGUF files with no model, half of one, or another one: each is refused by name."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import AioserveError, ModelError, UnsupportedModelError, WeightsError
from aioserve.models.files import model_files
from aioserve.models.gguf.config import FAMILIES, read_config
from aioserve.models.gguf.file import GGUFFile
from aioserve.models.gguf.parts import open_parts
from aioserve.testing.random_model import write_random_model
from tests.models.gguf.conversion import convert
from tests.models.gguf.writing import Stored, Typed, gguf_bytes, stored, write_gguf
from tests.parity.tiny_models import CONFIGS

Pairs = dict[str, Any]
Tensors = dict[str, Stored]


class Tiny(tuple[Pairs, Tensors]):
    """Metadata and tensors of a Llama of one layer."""

    def __repr__(self) -> str:
        return "tiny"  # hypothesis would print it all


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    directory = tmp_path_factory.mktemp("tiny")
    config = {**CONFIGS["llama3"], "num_hidden_layers": 1}
    write_random_model(directory, config, dtype="float32")
    path = convert(directory, directory / "x.gguf")
    file = GGUFFile(path)
    content = path.read_bytes()
    tensors = {
        name: Stored(entry.shape, 0, content[entry.offset : entry.offset + entry.num_bytes])
        for name, entry in file.tensors.items()
    }
    pairs = {
        key: Typed("i32", value.tolist()) if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items()
    }
    file.close()
    return Tiny((pairs, tensors))


def used(path: Path) -> None:
    """Read everything that loading reads, in the same order."""
    files = model_files(path)
    config = files.config()
    with files.weights(config) as weights:
        for tensor in (*config.required, config.head):
            if tensor in weights:
                weights[tensor].floats()
    files.chat_template()
    if files.why_no_tokenizer() is None:
        files.tokenizer()


def test_the_file_that_the_others_are_made_of_is_right(tmp_path: Path, tiny: Tiny) -> None:
    pairs, tensors = tiny
    used(write_gguf(tmp_path / "x.gguf", {**pairs, "tokenizer.ggml.model": "none"}, tensors))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"general.architecture": "mamba"}, "general.architecture = 'mamba' is not supported"),
        ({"general.architecture": "clip"}, "holds the part of a model that sees or hears (mmproj)"),
        ({"general.type": "mmproj"}, "holds the part of a model that sees or hears (mmproj)"),
        ({"general.type": "imatrix"}, "holds an importance matrix (imatrix)"),
        ({"general.type": "adapter"}, "general.type = 'adapter' is not supported"),
        ({"llama.made_up": 1}, "llama.made_up = 1 is not supported: an unknown setting"),
        ({"llama.attention.causal": False}, "only causal attention"),
        ({"llama.attention.value_length": 4}, "keys have 8 dimensions, and values 4"),
        ({"llama.rope.dimension_count": 4}, "this architecture rotates whole heads, of 8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope_freqs.weight scales frequencies already"),
        (
            {"llama.attention.head_count_kv": Typed("u32", [2, 1])},
            "all layers must be alike",
        ),
        ({"general.quantization_version": 1}, "general.quantization_version = 1 is not supported"),
    ],
)  # fmt: skip
def test_what_cant_be_served_is_refused_by_name(
    tmp_path: Path, tiny: Tiny, changed: Pairs, says: str
) -> None:
    pairs, tensors = tiny
    path = write_gguf(tmp_path / "x.gguf", {**pairs, **changed}, tensors)
    with pytest.raises(UnsupportedModelError) as caught:
        model_files(path).config()
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"general.architecture": 5}, "general.architecture must be a string, got 5"),
        ({"llama.block_count": None}, "llama.block_count must be an integer"),
        ({"llama.block_count": 0}, "llama.block_count must be an integer in [1,"),
        ({"llama.block_count": 10**6}, "llama.block_count must be an integer in [1, 1024]"),
        ({"llama.block_count": "3"}, "llama.block_count must be an integer"),
        ({"llama.embedding_length": -1}, "llama.embedding_length must be an integer"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count must be an integer"),
        ({"llama.attention.head_count_kv": Typed("u32", [])}, "an integer, or one for each layer"),
        ({"llama.attention.head_count_kv": 5}, "num_key_value_heads must be a divisor"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base must be a number"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_epsilon must be a number"),
        ({"general.sampling.temp": -3.0}, "temperature must be a number"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id must be an integer"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, tiny: Tiny, changed: Pairs, says: str
) -> None:
    pairs = {key: value for key, value in {**tiny[0], **changed}.items() if value is not None}
    path = write_gguf(tmp_path / "x.gguf", pairs, tiny[1])
    with pytest.raises(ModelError) as caught:
        model_files(path).config()
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt2"}))  # it lists no layers
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(name: str) -> None:
    keys = {"block_count": 2**31 - 1}
    if name == "deepseek2":
        rank = {"attention.kv_lora_rank": 8, "rope.dimension_count": 4}
        keys |= {"attention.key_length": 8, "attention.value_length": 8, **rank}
    metadata = {f"{name}.{key}": value for key, value in keys.items()}
    shapes = {"token_embd.weight": (8, 8)}
    with pytest.raises(ModelError) as caught:
        read_config({"general.architecture": name, **metadata}, shapes, lambda _: [], "x.gguf")
    assert f"{name}.block_count must be an integer in [1, 1024]" in str(caught.value)


def floats(*shape: int, form: str = "F32") -> Stored:
    return stored(np.ones(shape, np.float32), form)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"token_embd.weight": None}, "the weights lack token_embd.weight"),
        ({"blk.0.attn_q.weight": None}, "lack model.layers.0.self_attn.q_proj.weight"),
        ({"output_norm.weight": None}, "lack model.norm.weight"),
        ({"made_up.weight": floats(3)}, "the architecture llama has no place for made_up.weight"),
        ({"blk.0.attn_q.scale": floats(3)}, "has no place for blk.0.attn_q.scale"),
        ({"blk.7.attn_q.weight": floats(48, 48)}, "has no place for blk.7.attn_q.weight"),
        ({"blk.00.attn_q.weight": floats(48, 48)}, "has no place for blk.00.attn_q.weight"),
        ({"blk.0.ffn_gate_exps.weight": floats(2, 80, 48)}, "no place for blk.0.ffn_gate_exps"),
        ({"blk.0.attn_q_norm.weight": floats(8)}, "has no place for blk.0.attn_q_norm.weight"),
        ({"blk.0.ffn_up.weight": floats(48, 80)}, "has shape [48, 80], and its metadata ask for"),
        ({"blk.0.ffn_norm.weight": floats(1, 48)}, "has shape [1, 48], and its metadata ask for"),
        ({"rope_freqs.weight": floats(2, 2)}, "must be at most 4096 numbers of F32, got [2, 2]"),
        ({"rope_freqs.weight": floats(4, form="F16")}, "numbers of F32, got [4] of F16"),
        ({"rope_freqs.weight": floats(3)}, "short_factor must be a list of 4 numbers"),
    ],
)  # fmt: skip
def test_tensors_that_make_no_model_are_refused(
    tmp_path: Path, tiny: Tiny, changed: dict[str, Stored | None], says: str
) -> None:
    pairs, tensors = tiny
    kept = {k: v for k, v in {**tensors, **changed}.items() if v is not None}
    path = write_gguf(tmp_path / "x.gguf", pairs, kept)
    with pytest.raises(ModelError) as caught:
        used(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_vectors_of_blocks_are_refused(tmp_path: Path) -> None:
    config = {**CONFIGS["llama"], "hidden_size": 192, "num_hidden_layers": 1}
    write_random_model(tmp_path, config, dtype="float32")
    convert(tmp_path, tmp_path / "x.gguf")
    file = GGUFFile(tmp_path / "x.gguf")
    tensors = {
        name: floats(*entry.shape, form="Q8_0" if "ffn_norm" in name else "F32")
        for name, entry in file.tensors.items()
    }
    pairs = {k: v for k, v in file.metadata.items() if not k.startswith("tokenizer")}
    file.close()
    path = write_gguf(tmp_path / "y.gguf", pairs, tensors)
    with pytest.raises(WeightsError, match=r"ffn_norm\.weight is a vector of Q8_0, must be floats"):
        used(path)


def test_what_the_config_was_read_from_needs_no_place(tmp_path: Path, tiny: Tiny) -> None:
    pairs, tensors = tiny
    assert "rope_freqs.weight" in tensors
    more = {**tensors, "blk.0.attn_rot_embd.weight": floats(4)}
    path = write_gguf(tmp_path / "x.gguf", pairs, more)
    files = model_files(path)
    with files.weights(files.config()) as weights:
        assert weights.total_bytes == sum(
            len(entry.content) for name, entry in tensors.items() if name != "rope_freqs.weight"
        )


# -- parts


def split(directory: Path, pairs: Pairs, tensors: Tensors, count: int = 3) -> list[Path]:
    names = list(tensors)
    paths = []
    for part in range(count):
        own = {
            "split.no": Typed("u16", part),
            "split.count": Typed("u16", count),
            "split.tensors.count": Typed("i32", len(names)),
        }
        kept = {name: tensors[name] for name in names[part::count]}
        path = directory / f"x-{part + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, {**pairs, **own} if part == 0 else own, kept))
    return paths


def test_parts_are_one_model(tmp_path: Path, tiny: Tiny) -> None:
    pairs, tensors = tiny
    pairs = {**pairs, "tokenizer.ggml.model": "none"}
    whole = write_gguf(tmp_path / "whole.gguf", pairs, tensors)
    (tmp_path / "parts").mkdir()
    paths = split(tmp_path / "parts", pairs, tensors)
    (tmp_path / "parts" / "mmproj-x.gguf").write_bytes(b"GGUF")
    one, other = model_files(whole), model_files(tmp_path / "parts")
    assert other.path == paths[0]
    assert other.config() == replace(one.config())
    assert other.weight_file_bytes() == [path.stat().st_size for path in paths]
    with one.weights(one.config()) as ours, other.weights(other.config()) as theirs:
        assert ours.total_bytes == theirs.total_bytes
        for tensor in (*one.config().required, one.config().head):
            if tensor in ours:
                assert np.array_equal(ours[tensor].floats(), theirs[tensor].floats())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("second", "is part 2 of a model: give the first part, x-00001-of-00003.gguf"),
        ("lost", "x-00003-of-00003.gguf: no such file, but x-00001-of-00003.gguf has 3 parts"),
        ("renamed", "is the first of 3 parts, so its name must end in -00001-of-00003.gguf"),
        ("swapped", "split.no must be 1 in this part, got 2"),
        ("count", "split.count must be 3 in this part, got 2"),
        ("total", "split.tensors.count is 99, its parts have"),
        ("many", "split.count must be at most 1000, got 60000"),
        ("text", "split.count must be an integer, got '3'"),
        ("twice", "is also in"),
    ],
)
def test_parts_that_dont_fit_are_refused(
    tmp_path: Path, tiny: Tiny, change: str, says: str
) -> None:
    pairs, tensors = tiny
    paths = split(tmp_path, pairs, tensors)
    path = paths[0]
    names = list(tensors)
    first = {name: tensors[name] for name in names[0::3]}
    if change == "second":
        path = paths[1]
    elif change == "lost":
        paths[2].unlink()
    elif change == "renamed":
        path = paths[0].rename(tmp_path / "x.gguf")
    elif change == "swapped":
        paths[1].write_bytes(paths[2].read_bytes())
    elif change == "count":
        split(tmp_path / "..", pairs, tensors, 2)
        paths[1].write_bytes((tmp_path / ".." / "x-00002-of-00002.gguf").read_bytes())
    elif change == "twice":
        own = {"split.no": Typed("u16", 1), "split.count": Typed("u16", 3)}
        again = {name: tensors[name] for name in (*names[1::3], names[0])}
        write_gguf(paths[1], own, again)
        write_gguf(paths[0], {**pairs, "split.count": Typed("u16", 3)}, first)
    else:
        key, value = {
            "total": ("split.tensors.count", 99),
            "many": ("split.count", 60_000),
            "text": ("split.count", "3"),
        }[change]
        write_gguf(paths[0], {**pairs, "split.count": 3, key: value}, first)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(WeightsError) as caught:
        used(path)
    assert says in str(caught.value)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_directory_with_several_models_says_which_there_are(tmp_path: Path) -> None:
    for name in ("b-Q4.gguf", "a-Q8.gguf", "a-mmproj.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    says = r"no GGUF model is Q4_K_M; name one of a-Q8\.gguf, b-Q4\.gguf$"
    with pytest.raises(ModelError, match=says):
        model_files(tmp_path)
    (tmp_path / "b-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert model_files(tmp_path).path == tmp_path / "b-Q4_K_M.gguf"


def test_files_are_closed_again(tmp_path: Path, tiny: Tiny) -> None:
    paths = split(tmp_path, *tiny)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with ExitStack() as stack:
        open_parts(paths[0], stack)
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 3
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# -- arbitrary bytes


VALUES = st.one_of(
    st.text(max_size=5),
    st.booleans(),
    st.integers(-(2**31), 2**32 - 1),
    st.floats(width=32),
    st.lists(st.text(max_size=3), max_size=3),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)


@given(number=st.integers(0, 99), value=VALUES)
def test_whatever_a_file_says_only_the_houses_errors_come(
    tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, number: int, value: Any
) -> None:
    pairs, tensors = tiny
    key = sorted(pairs)[number % len(pairs)]
    path = tmp_path_factory.getbasetemp() / "said.gguf"
    path.write_bytes(gguf_bytes({**pairs, key: value}, tensors))
    try:
        used(path)
    except AioserveError as error:
        said = str(error)
        assert str(path) in said
        assert len(said) < 1500
