"""Models and faults for tests of copies in any format."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

__all__ = ["fill_the_disk", "give_a_tower"]


def give_a_tower(model: Path, tower: Mapping[str, torch.Tensor]) -> None:
    """Turn a Gemma 3 into one that also takes images, with the tensors `tower` for them."""
    text = json.loads((model / "config.json").read_text())
    said = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    (model / "config.json").write_text(json.dumps(said))
    tensors = load_file(model / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**named, **tower}, model / "model.safetensors")


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make write number `number`, counted from 0, fail for lack of space."""
    pwrite, calls = os.pwrite, iter(range(1000))

    def failing(*args: Any) -> int:
        if next(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", failing)
