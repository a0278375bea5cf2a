"""The comparison with transformers runs, and its arithmetic is what its docstring says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aioserve.testing.random_model import write_random_model

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "against_transformers.py"
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_both_engines_do_the_same_work(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "tiny", TINY, dtype="float32")
    result = tmp_path / "result.json"
    sizes = ("--output-tokens", "4", "--concurrency", "3", "--prefill-tokens", "24")
    subprocess.run(
        [
            *(sys.executable, SCRIPT, "--models", model, "--dtypes", "float32", *sizes),
            *("--repeats", "1", "--json", result),
        ],
        check=True,
        timeout=170,
    )
    rows = json.loads(result.read_text())
    counted = {"single": 4, "concurrent": 12, "prefill": 24}
    assert [row["name"] for row in rows] == list(counted)
    for row in rows:
        for engine, rate in row["tokens_per_second"].items():
            assert rate * row["seconds"][engine][0] == pytest.approx(counted[row["name"]])
        rates = row["tokens_per_second"]
        assert row["ratio"] == pytest.approx(rates["aioserve"] / rates["transformers"])
