"""Models and their oracles, written and loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve.ops import Backend, backend_named
from tests.parity import tiny_models
from tests.parity.cases import BACKENDS
from tests.parity.exact import float64_throughout

Oracle = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread in torch: matrices are tiny, so that threads would only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    @cache
    def write(name: str) -> Path:
        return tiny_models.write(name, root / name)

    return write


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_named(request.param)


@pytest.fixture(scope="session")
def oracle(directory_of: Callable[[str], Path]) -> Oracle:
    """Load transformers' model of a name, with attention and experts in plain torch.

    It computes in float32 or `dtype`. `long_context` uses longrope's long factors for short inputs,
    too, as aioserve does when it serves long contexts.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    @cache
    def load(name: str, *, long_context: bool = False, dtype: torch.dtype = torch.float32) -> Any:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory_of(name),
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=dtype,
            output_loading_info=True,
        )
        model, info = loaded
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        if long_context and name == "phi3-longrope":
            rotary = model.model.rotary_emb
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
                model.config, seq_len=tiny_models.MAX_POSITIONS
            )
            rotary.original_inv_freq.copy_(frequencies)
        return model.eval()

    return load


@pytest.fixture(scope="session")
def exact_logits(oracle: Oracle) -> Callable[..., torch.Tensor]:
    """Compute logits of transformers' model of a name in float64: [ids, vocabulary].

    Float32 in any order of operations only rounds these. Other arguments are those of `oracle`."""

    def compute(name: str, ids: list[int], **options: Any) -> torch.Tensor:
        model = oracle(name, dtype=torch.float64, **options)
        with torch.inference_mode(), float64_throughout():
            return model(torch.tensor([ids]), use_cache=False).logits[0]

    return compute
