"""What happens to copies, and what they are made of, whatever they are written as."""

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
    """Make a Gemma 3 one that takes images as well, with these tensors for them."""
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
    """The write of that number, from 0, finds no room."""
    pwrite, calls = os.pwrite, iter(range(1000))

    def failing(*args: Any) -> int:
        if next(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", failing)
