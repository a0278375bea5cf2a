"""Targets of heads, in float32."""

from __future__ import annotations

import pytest
import torch

from aioserve.models.decoder import Decoder
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from tests.parity.tiny_models import VOCAB_SIZE, write


@pytest.fixture(scope="package")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    """Load one target on each backend, in float32."""
    directory = write("llama", tmp_path_factory.mktemp("target"))
    return {
        name: load_model(directory, dtype="float32", backend=backend_named(name))
        for name in ("reference", "native")
    }


@pytest.fixture(scope="package")
def shared(targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's embedding and output layer, both [vocab, hidden]."""
    ids = torch.arange(VOCAB_SIZE)
    embedding = targets["reference"].embedding
    table = embedding if isinstance(embedding, torch.Tensor) else embedding.rows(ids)
    return table, targets["reference"].head.rows(ids)
