"""Model directories come from anywhere. Whatever their files hold, the model loads and serves a
token, or a `ModelError` names the directory and says what is wrong. Both happen soon and in little
memory."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aioserve import (
    ConfigError,
    Engine,
    ModelError,
    ModelNotFoundError,
    RequestFailedError,
    SamplingParams,
    WeightsError,
)
from aioserve.execution.loading import read as loading_read
from aioserve.formats.weights import NATIVE
from aioserve.models.checkpoint import MAX_INDEX_BYTES
from aioserve.models.config import MAX_CONFIG_BYTES, DecoderConfig
from aioserve.models.files import model_files
from aioserve.models.gguf.file import GGUFFile
from aioserve.models.gguf.tokenizer import GGUFVocabulary
from aioserve.models.loader import load_model
from aioserve.models.reading import WeightReading
from aioserve.models.safetensors_file import MAX_HEADER_BYTES
from aioserve.testing import check_invariants
from tests.attacks.held_loop import MAX_HELD_SECONDS, HeldLoop, assert_loop_is_free
from tests.attacks.hostile import HUGE_INTS, hostile_json, hostile_values, named_errors
from tests.models.gguf.writing import write_gguf
from tests.parity.tiny_models import CONFIGS, write
from tests.tiers import clock_counts
from tests.timing import computing_at_most

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
MAX_SECONDS = 5.0
FAMILIES = (
    "llama3", "gemma3", "gpt2", "phi3-longrope", "qwen3-sliding", "mistral", "olmo3", "granite4",
    "smollm3", "ministral3", "cohere2", "neox",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
NUMBERS = [0, 1, 2, -1, 0.5, 1e-30, 1e30, 1e308, 5e-324, float("nan"), float("inf"), 2**31 - 1]
DEEP = '{"a": ' * 50_000 + "1" + "}" * 50_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models without a tokenizer: one of each family, and "shards", whose weights are
    in two files. The model "text" has a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    found = {name: write(name, root / name) for name in FAMILIES}
    found["shards"] = shards = write("llama", root / "shards")
    for model in found.values():
        (model / "tokenizer.json").unlink()
    found["text"] = write("llama", root / "text")
    tensors = load_file(shards / WEIGHTS)
    (shards / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {name: f"{'ab'[at % 2]}.safetensors" for at, name in enumerate(names)}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({k: tensors[k] for k in names if weight_map[k] == file}, shards / file)
    (shards / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return found


@contextmanager
def with_file(model: Path, name: str, content: str | bytes) -> Iterator[Path]:
    """The same model, with this in place of one of its files."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for file in model.iterdir():
            (directory / file.name).symlink_to(file)
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        yield directory


def read(model: Path, name: str) -> dict[str, Any]:
    return json.loads((model / name).read_text())


async def serve(directory: Path) -> None:
    async with Engine(directory, num_pages=16, page_size=4, max_num_seqs=2) as engine:
        assert (await engine.generate([1], GREEDY)).usage.completion_tokens > 0
        check_invariants(engine)


def attack(directory: Path) -> str | None:
    """Return what is wrong with the model, or None if it serves."""
    messages: list[str] = []

    async def try_to_serve() -> None:
        with named_errors():
            try:
                await serve(directory)
            except ModelError as error:
                messages.append(str(error))
                raise

    async def is_free() -> bool:
        held = HeldLoop()
        watching = asyncio.create_task(held.watch())
        await try_to_serve()
        watching.cancel()
        return held.seconds <= MAX_HELD_SECONDS or not clock_counts()

    with computing_at_most(MAX_SECONDS):
        free = asyncio.run(is_free())
    if not free:  # perhaps the collector, which the thorough way keeps away
        asyncio.run(assert_loop_is_free(try_to_serve))
    assert all(str(directory) in message for message in messages)
    return messages[-1] if messages else None


def refused(model: Path, name: str, content: str | bytes) -> str:
    with with_file(model, name, content) as directory:
        message = attack(directory)
        assert message is not None
        assert name in message
        return message


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys on the way to each value within a value."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    found = [(*at, key) for key, _ in items]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list):
            found += places(inner, (*at, key))
    return found


def with_value(whole: Any, place: tuple[Any, ...], value: Any) -> Any:
    whole = inner = copy.deepcopy(whole)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return whole


HOSTILE_JSON = hostile_json()
HOSTILE_FIELDS = (
    HOSTILE_JSON
    | st.sampled_from(NUMBERS)
    | st.sampled_from([value for value in HUGE_INTS if value < 10**4000])
)


@st.composite
def broken(draw: st.DrawFn, whole: Any, *more: str) -> bytes:
    """JSON like `whole` with some values replaced, perhaps those of fields in `more`; sometimes no
    JSON any more."""
    text = json.dumps(draw(HOSTILE_JSON))
    if draw(st.integers(0, 9)):
        for _ in range(draw(st.integers(1, 3))):
            options = places(whole) + [(name,) for name in more]
            place = draw(st.sampled_from(options))
            whole = with_value(whole, place, draw(HOSTILE_FIELDS))
        text = json.dumps(whole)
    content = text.encode()
    how = draw(st.integers(0, 19))
    if how == 0:
        content = content[: draw(st.integers(0, len(content)))]
    elif how == 1:
        content = content.replace(b": ", b": " + b"[" * 50_000, 1)
    elif how == 2:
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=4)) + content[at:]
    return content


MORE_FIELDS = (
    "head_dim", "layer_types", "sliding_window", "rope_scaling", "rope_parameters", "rope_theta",
    "partial_rotary_factor", "original_max_position_embeddings", "n_inner", "dtype", "torch_dtype",
    "max_window_layers", "use_sliding_window", "query_pre_attn_scalar", "final_logit_softcapping",
    "attn_logit_softcapping", "quantization_config", "is_encoder_decoder", "text_config",
    "no_rope_layers", "no_rope_layer_interval", "logit_scale", "logits_scaling", "norm_eps",
    "residual_multiplier", "sliding_window_pattern", "use_parallel_residual", "layer_norm_eps",
)  # fmt: skip


@pytest.mark.more
@given(data=st.data())
def test_fuzz_config(models: dict[str, Path], data: st.DataObject) -> None:
    model = models[data.draw(st.sampled_from(FAMILIES))]
    content = data.draw(broken(read(model, CONFIG), *MORE_FIELDS))
    with with_file(model, CONFIG, content) as directory:
        attack(directory)


GENERATION_CONFIG = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "eos_token_id": [2, 3],
    "repetition_penalty": 1.1, "num_beams": 2, "min_p": 0.1,
}  # fmt: skip


@given(content=broken(GENERATION_CONFIG))
def test_fuzz_generation_config(models: dict[str, Path], content: bytes) -> None:
    with with_file(models["llama3"], GENERATION, content) as directory:
        attack(directory)


FILE_NAMES = [
    "", ".", "..", "../a.safetensors", "/etc/passwd", "/dev/zero", "a\x00.safetensors", "b",
    "a.safetensors/", "\ud800.safetensors", "\U0001f468" * 200 + ".safetensors", "x" * 5000,
    "x" * 5000 + ".safetensors", "none.safetensors", CONFIG, "..\\a.safetensors", "a.safetensors",
]  # fmt: skip


@given(data=st.data())
def test_fuzz_index(models: dict[str, Path], data: st.DataObject) -> None:
    index = read(models["shards"], INDEX)
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(index["weight_map"])) | st.text(max_size=5))
        index["weight_map"][name] = data.draw(st.sampled_from(FILE_NAMES))
        content = json.dumps(index).encode()
    else:
        content = data.draw(broken(index))
    with with_file(models["shards"], INDEX, content) as directory:
        attack(directory)


@pytest.mark.more
@given(data=st.data())
def test_fuzz_tokenizer_files(models: dict[str, Path], data: st.DataObject) -> None:
    model = models["text"]
    special = {"bos_token": "a", "eos_token": {"content": "b"}, "pad_token": None}
    files: dict[str, Any] = {
        "tokenizer_config.json": {"chat_template": "{{ messages }}", **special},
        "special_tokens_map.json": special,
        "tokenizer.json": read(model, "tokenizer.json"),
    }
    name = data.draw(st.sampled_from([*files, "chat_template.jinja"]))
    content = data.draw(broken(files[name]) if name in files else st.binary(max_size=50))
    with with_file(model, name, content) as directory:
        attack(directory)


@st.composite
def broken_weights(draw: st.DrawFn, content: bytes) -> bytes:
    (size,) = struct.unpack_from("<Q", content)
    header, tensors = content[8 : 8 + size], content[8 + size :]
    how = draw(st.integers(0, 4))
    if how == 0:
        return content[: draw(st.integers(0, len(content)))]
    if how == 1:
        claimed = draw(st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, size - 1, size + 1]))
        return struct.pack("<Q", claimed) + header + tensors
    if how == 2:
        flipped = bytearray(content)
        for at in draw(st.lists(st.integers(0, 8 + size - 1), min_size=1, max_size=5)):
            flipped[at] ^= 1 << draw(st.integers(0, 7))
        return bytes(flipped)
    if how == 3:
        header = draw(broken(json.loads(header)))
    tensors = draw(st.sampled_from([tensors, tensors[:-4], tensors * 2, b""]))
    return struct.pack("<Q", len(header)) + header + tensors


@given(data=st.data())
def test_fuzz_safetensors(models: dict[str, Path], data: st.DataObject) -> None:
    model = models[data.draw(st.sampled_from(FAMILIES))]
    content = data.draw(broken_weights((model / WEIGHTS).read_bytes()))
    with with_file(model, WEIGHTS, content) as directory:
        attack(directory)


@given(value=hostile_values())
def test_fuzz_name_of_a_model(value: Any) -> None:
    with named_errors():
        asyncio.run(serve(value))


@given(value=hostile_values())
def test_fuzz_progress(models: dict[str, Path], value: Any) -> None:
    if value is not None and not callable(value):
        with named_errors(), pytest.raises(ConfigError, match="progress must be callable"):
            Engine(models["llama3"], progress=value)


# -- each case by itself

SIZES = {
    "llama3": ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
               "num_attention_heads", "num_key_value_heads"],
    "gpt2": ["vocab_size", "n_embd", "n_inner", "n_layer", "n_head", "n_positions"],
}  # fmt: skip


@pytest.mark.clock
@pytest.mark.parametrize(
    ("family", "field"), [(family, field) for family in SIZES for field in SIZES[family]]
)
@pytest.mark.parametrize("value", [10**6, 2**31 - 1, 10**12, 2**63, 10**30, 10**400])
def test_a_size_that_the_weights_dont_have_costs_no_time_and_no_memory(
    models: dict[str, Path], family: str, field: str, value: int
) -> None:
    model = models[family]
    with with_file(model, CONFIG, json.dumps({**read(model, CONFIG), field: value})) as directory:
        tracemalloc.start()
        try:
            with computing_at_most(1.0), pytest.raises(ModelError) as caught:
                load_model(directory)
            assert tracemalloc.get_traced_memory()[1] < 20e6
        finally:
            tracemalloc.stop()
        assert str(directory) in str(caught.value)


@pytest.mark.clock
def test_the_most_layers_that_are_believed_are_compared_with_the_weights_within_a_second(
    models: dict[str, Path],
) -> None:
    config = json.dumps({**read(models["llama3"], CONFIG), "num_hidden_layers": 1024})
    lacking = r"the weights lack model\.layers\.10\..*more tensors"
    with (
        with_file(models["llama3"], CONFIG, config) as directory,
        computing_at_most(1.0),
        pytest.raises(ModelError, match=lacking),
    ):
        load_model(directory)


@pytest.mark.sampled(1)
@pytest.mark.clock
@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama3", {"max_position_embeddings": 1}, "max_position_embeddings must be an integer in"),
        ("gpt2", {"n_positions": 1}, "n_positions must be an integer in"),
        ("mistral", {"sliding_window": 2**63}, "sliding_window must be an integer in"),
        ("mistral", {"sliding_window": 2**31}, "sliding_window must be an integer in"),
        ("llama3", {"rms_norm_eps": 5e-324}, "rms_norm_eps must be a number in"),
        ("llama3", {"rms_norm_eps": float("inf")}, "rms_norm_eps must be a number in"),
        ("llama3", {"rope_theta": 1e-308}, "rope_theta must be a number in"),
        ("llama3", {"rope_theta": 10**400}, "rope_theta must be a number in"),
        ("qwen3-sliding", {"layer_types": 5}, "layer_types must be a list"),
        ("mistral", {"layer_types": 5}, "layer_types must be a list"),
        ("llama3", {"architectures": 5}, "architectures must be a list of strings"),
        ("llama3", {"architectures": ["x" * 10**5]}, "is not supported"),
        ("llama3", {"rope_scaling": {"x" * 10**5: 1}}, "an unknown rotary parameter"),
        ("llama3", {"hidden_size": "x" * 10**5}, "hidden_size must be an integer in"),
        ("phi3-longrope", {"original_max_position_embeddings": 1}, "must be an integer in [2,"),
        ("phi3-longrope", {"partial_rotary_factor": float("inf")}, "must be a number in"),
        ("llama3", {"eos_token_id": 10**30}, "eos_token_id must be a token id"),
    ],
)
def test_a_setting_that_no_engine_can_serve_is_refused_by_name(
    models: dict[str, Path], family: str, changes: dict[str, Any], says: str
) -> None:
    model = models[family]
    assert says in refused(model, CONFIG, json.dumps({**read(model, CONFIG), **changes}))


@pytest.mark.clock
@pytest.mark.parametrize("positions", [2, 2**31 - 1])
def test_a_model_with_the_least_or_the_most_positions_serves(
    models: dict[str, Path], positions: int
) -> None:
    config = {**read(models["llama3"], CONFIG), "max_position_embeddings": positions}
    with with_file(models["llama3"], CONFIG, json.dumps(config)) as directory:
        assert attack(directory) is None


@pytest.mark.clock
@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.5), ("temperature", 1e6), ("top_p", 1.5), ("top_k", -3), ("top_k", 2.5)],
)
def test_a_bad_generation_config_is_the_models_error_and_names_file_field_and_value(
    models: dict[str, Path], field: str, value: float
) -> None:
    message = refused(models["llama3"], GENERATION, json.dumps({"do_sample": True, field: value}))
    assert f"{GENERATION}: {field} must be " in message
    assert str(value) in message or f"{value:g}" in message


@pytest.mark.clock
def test_an_error_of_the_tokenizers_library_is_shortened(models: dict[str, Path]) -> None:
    refused(models["text"], "tokenizer.json", json.dumps({"version": "x" * 10**5}))


@pytest.mark.clock
@pytest.mark.parametrize("name", [CONFIG, GENERATION, INDEX])
def test_deeply_nested_json_is_refused(models: dict[str, Path], name: str) -> None:
    assert "nested too deeply" in refused(models["shards"], name, DEEP)


@pytest.mark.clock
@pytest.mark.parametrize(
    ("name", "limit"),
    [(CONFIG, MAX_CONFIG_BYTES), (GENERATION, MAX_CONFIG_BYTES), (INDEX, MAX_INDEX_BYTES)],
)
def test_a_file_that_is_too_large_is_refused_unread(
    models: dict[str, Path], name: str, limit: int
) -> None:
    with with_file(models["shards"], name, "") as directory:
        os.truncate(directory / name, 10**8)
        assert f"{name}: has 100000000 bytes, must have at most {limit}" in (
            attack(directory) or ""
        )


@pytest.mark.clock
def test_a_header_that_is_too_large_is_refused_unread(models: dict[str, Path]) -> None:
    with with_file(models["llama3"], WEIGHTS, struct.pack("<Q", 10**8)) as directory:
        os.truncate(directory / WEIGHTS, 2 * 10**8)
        message = attack(directory) or ""
        assert f"{WEIGHTS}: " in message
        assert f"header claims 100000000 bytes, at most {MAX_HEADER_BYTES} are read" in message


@pytest.mark.clock
def test_weights_beyond_the_machines_memory_are_refused_unread(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_read, "total_memory_bytes", lambda: 1000)
    with with_file(models["llama3"], CONFIG, (models["llama3"] / CONFIG).read_bytes()) as directory:
        values = sum(tensor.numel() for tensor in load_file(directory / WEIGHTS).values())
        with WeightReading(model_files(directory), formats=NATIVE) as reading:
            held_bytes = reading.read().memory.held_bytes
        with WeightReading(model_files(directory), formats=NATIVE, quantization="int4") as reading:
            int4_bytes = reading.expected_memory.held_bytes
        # Kernels hold panels of whole outputs, and a small embedding is held as rows, too.
        assert 4 * values <= held_bytes <= 5 * values
        assert attack(directory) == (
            f"{directory}: the weights take {held_bytes} bytes in float32, and there are "
            "1000 bytes of memory: with quantization='int4' they take "
            f"{int4_bytes}, which doesn't fit either"
        )


@pytest.mark.clock
def test_weights_of_800_gb_in_a_sparse_file_are_refused_unread(models: dict[str, Path]) -> None:
    """config.json, the header and the file's size agree."""
    model, rows = models["llama3"], 1 << 31
    with (model / WEIGHTS).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    end = 0
    for name, tensor in header.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensor["shape"][0] = rows - 1
        size = 4 * math.prod(tensor["shape"])
        tensor["data_offsets"] = [end, end + size]
        end += size
    content = json.dumps(header).encode()
    config = json.dumps({**read(model, CONFIG), "vocab_size": rows - 1})
    with with_file(model, CONFIG, config) as directory:
        (directory / WEIGHTS).unlink()
        (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(content)) + content)
        os.truncate(directory / WEIGHTS, 8 + len(content) + end)
        assert attack(directory) is not None


@pytest.mark.sampled(1)
@pytest.mark.clock
@pytest.mark.parametrize("file_name", [name for name in FILE_NAMES if name != "a.safetensors"])
def test_an_index_names_files_of_its_own_directory_alone(
    models: dict[str, Path], file_name: str
) -> None:
    index = read(models["shards"], INDEX)
    index["weight_map"]["model.norm.weight"] = file_name
    message = refused(models["shards"], INDEX, json.dumps(index))
    assert "weight_map.model.norm.weight must be a .safetensors file name" in message or (
        file_name.endswith(".safetensors")
        and ("no such file" in message or "surrogates not allowed" in message)
    )


def test_weights_that_are_no_numbers_fail_requests_by_name(models: dict[str, Path]) -> None:
    tensors = load_file(models["llama3"] / WEIGHTS)
    tensors["model.norm.weight"].fill_(torch.nan)
    with with_file(models["llama3"], WEIGHTS, b"") as directory:
        save_file(tensors, directory / WEIGHTS)
        with pytest.raises(RequestFailedError):
            asyncio.run(serve(directory))


@pytest.mark.parametrize(
    "name", ["", "~nosuchuser/m", "x" * 300, "x" * 10**5, "a\0b", "a\ud800b", "/" * 5000, "../../x"]
)
def test_a_name_of_no_model_is_not_found(name: str) -> None:
    with named_errors():
        with pytest.raises(ModelNotFoundError) as caught:
            asyncio.run(serve(name))  # pyright: ignore[reportArgumentType]
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("made", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_weights_that_are_no_file_are_named(
    models: dict[str, Path], made: Callable[[Path], None]
) -> None:
    with with_file(models["llama3"], WEIGHTS, b"") as directory:
        (directory / WEIGHTS).unlink()
        made(directory / WEIGHTS)
        with pytest.raises(WeightsError, match=r"model\.safetensors: not a file that can be read"):
            asyncio.run(serve(directory))


@pytest.mark.parametrize("model", [5, None, b"pyhelp", ["pyhelp"], {}, 1.5, object()])
def test_what_is_neither_a_name_nor_loads_is_refused_at_once(model: Any) -> None:
    with pytest.raises(ConfigError, match="model must be a name, a directory or an object that"):
        Engine(model)


async def _asynchronous(done: int, total: int) -> None: ...


@pytest.mark.parametrize("progress", [5, "x", b"", [], _asynchronous])
def test_progress_must_be_callable(progress: Any) -> None:
    with pytest.raises(ConfigError, match="progress must be callable and not async, got "):
        Engine("pyhelp", progress=progress)


def test_a_file_a_pipe_and_a_directory_without_config_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / CONFIG)
    for path in (tmp_path, tmp_path / "file", tmp_path / "pipe"):
        with pytest.raises(ModelNotFoundError):
            asyncio.run(serve(path))


HOLDING = {
    CONFIG: '{"a": [' + "[]," * 120_000 + "[]]}",
    INDEX: '{"weight_map": {'
    + ",".join(f'"{i:06}": "b.safetensors"' for i in range(240_000))
    + "}}",
    "b.safetensors": json.dumps(
        {f"{i:06}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(15_000)}
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("name", HOLDING)
def test_no_file_of_a_model_holds_the_loop(models: dict[str, Path], name: str) -> None:
    content = HOLDING[name].encode()
    if name == "b.safetensors":
        content = struct.pack("<Q", len(content)) + content

    def load(directory: Path) -> None:
        with pytest.raises(ModelError):
            load_model(directory)

    with with_file(models["shards"], name, content) as directory:
        asyncio.run(assert_loop_is_free(lambda: asyncio.to_thread(load, directory)))


@pytest.mark.more
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_no_vocabulary_of_a_gguf_file_holds_the_loop(tmp_path: Path, kind: str) -> None:
    """The vocabulary has 200,000 tokens and as many merges; those that follow from scores are
    looked for."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{a}{b}{c}" for a in letters for b in letters for c in letters)]
    tokens += [f"{i:x}{i:o}" for i in range(200_000 - len(tokens))]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.merges": ["a b"] * 200_000,
    }
    path = write_gguf(tmp_path / "x.gguf", metadata)

    def read() -> None:
        file = GGUFFile(path)
        file.close()
        vocabulary = GGUFVocabulary(file.metadata, str(path))
        assert len(vocabulary.tokenizer_json()) > 3_000_000

    asyncio.run(assert_loop_is_free(lambda: asyncio.to_thread(read)))


@pytest.mark.more
def test_reading_a_config_costs_as_little_as_ever() -> None:
    with computing_at_most(1.0):
        for config in CONFIGS.values():
            DecoderConfig.from_dict(config)
