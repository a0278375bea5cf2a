"""Only ModelFiles knows how a model is stored on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aioserve.assets import model_path
from aioserve.errors import ModelNotFoundError
from aioserve.models.files import ModelDirectory, model_files
from tests.house import PACKAGE

NAMED = re.compile(r'"(config\.json|generation_config\.json|tokenizer\.json|\*\.safetensors)"')
READERS = {
    "models/files.py",
    "models/resolve.py",
    "text/tokenizer.py",
    "models/checkpoint.py",
    "models/retrieval.py",
    "models/gguf/vocabulary.py",
    "models/heads/loader.py",
    "models/heads/read.py",
}
"""Modules behind `ModelFiles`, the search for models, and the writer of GGUF tokenizers."""
WRITERS = {
    "assets/__init__.py",
    "cli/_family_template.py",
    "cli/_models.py",
    "cli/_weight_format_template.py",
    "models/hub.py",
    "testing/random_model.py",
    "models/config.py",
    "models/quantization/quantized_copy.py",
}
"""Modules that name files which they write, ship or download, or name them only in messages."""


def test_no_other_module_names_the_files_of_a_model():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if NAMED.search(path.read_text(encoding="utf-8"))
    }
    assert found - READERS - WRITERS == set()


def test_a_directory_gives_all_that_a_model_is_made_of():
    files = model_files(model_path("pyhelp") or "")
    assert isinstance(files, ModelDirectory)
    config = files.config()
    values, source = files.config_values()
    assert values["architectures"] == [config.architecture]
    assert Path(source) == files.path / "config.json"
    assert files.why_no_tokenizer() is None
    assert files.tokenizer().vocab_size <= config.vocab_size
    assert files.chat_template() is not None
    with files.weights(config) as weights:
        assert sum(files.weight_file_bytes()) > weights.total_bytes > 0
        embedding = weights[config.embedding]
        assert (embedding.out_features, embedding.in_features) == config.embedding.shape


def test_what_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=f"{tmp_path / 'nowhere'}: no such directory"):
        model_files(tmp_path / "nowhere")
