"""Random model directories: complete, reproducible, with a tokenizer that covers the vocabulary."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from aioserve.errors import UnsupportedModelError
from aioserve.models.files import model_files
from aioserve.testing.random_model import write_random_model
from aioserve.text.tokenizer import Tokenizer
from tests.parity.tiny_models import CONFIGS, VOCAB_SIZE


def test_the_seed_decides_the_weights(tmp_path):
    config = CONFIGS["qwen3"]
    files = [
        load_file(write_random_model(tmp_path / str(i), config, seed=seed) / "model.safetensors")
        for i, seed in enumerate((7, 7, 8))
    ]

    assert all(files[0][name].equal(files[1][name]) for name in files[0])
    assert not any(files[0][name].equal(files[2][name]) for name in files[0])


def test_the_dtype_is_written_into_the_config(tmp_path):
    write_random_model(tmp_path, CONFIGS["qwen3"], dtype="float32")
    assert model_files(tmp_path).config().dtype == "float32"

    with pytest.raises(ValueError, match=r"dtype must be one of .*'int8'"):
        write_random_model(tmp_path, CONFIGS["qwen3"], dtype="int8")


def test_a_config_that_cant_be_loaded_writes_nothing(tmp_path):
    with pytest.raises(UnsupportedModelError):
        write_random_model(tmp_path / "new", {"architectures": ["Nonsense"]})

    assert not (tmp_path / "new").exists()


def test_the_tokenizer_reads_any_text_and_writes_any_id(tmp_path):
    tokenizer = Tokenizer.from_directory(write_random_model(tmp_path, CONFIGS["qwen3"]))
    text = "def f():\n\treturn 'Grüße, 世界 \x00\x7f'"

    ids = tokenizer.encode(text)

    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.decode([104, 256, 287]) == "h?256?287"
