"""The `aioserve` command, in its own process or in this one, and a tiny model for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.cli import main
from aioserve.testing.random_model import write_random_model
from tests.cli.command import Run
from tests.cli.forked import Forks
from tests.waits import LIMIT_SECONDS


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers without a chat template."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return write_random_model(directory, config, dtype="float32")


@pytest.fixture
def aioserve_anew() -> Run:
    """Run the command to its end, with a new Python."""

    def run(
        *arguments: object, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "aioserve", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=200,
            env=os.environ | {"COLUMNS": "120"} | environment,
        )

    return run


@pytest.fixture
def aioserve(forking: Forks) -> Run:
    """Run the command to its end in its own process, which has imported torch already."""

    def run(
        *arguments: object, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return forking.run(
            list(map(str, arguments)),
            stdin=stdin,
            environment=os.environ | {"COLUMNS": "120"} | environment,
            seconds=LIMIT_SECONDS,
        )

    return run


@pytest.fixture
def aioserve_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process, which saves the import of torch.

    Other tests may have imported pydantic. Then cyclopts checks values with it; the command itself
    doesn't import it.
    """
    monkeypatch.delitem(sys.modules, "pydantic", raising=False)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = list(map(str, arguments))
        with pytest.raises(SystemExit) as leaving:
            main(words)
        output = capsys.readouterr()
        code = leaving.value.code
        return subprocess.CompletedProcess(words, int(code or 0), output.out, output.err)

    return run
