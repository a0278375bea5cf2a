"""Directory of a head before its weights are read, and checks against a target. No torch here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol

from aioserve.errors import ModelError, ModelNotFoundError
from aioserve.json_file import read_json_object
from aioserve.models.config import MAX_CONFIG_BYTES
from aioserve.models.fields import Fields
from aioserve.models.heads.config import Eagle3Config, HeadConfig
from aioserve.models.heads.reading import read_head_config
from aioserve.models.heads.tensors import HeadTensors

__all__ = ["HeadTarget", "ReadHead"]

CONFIG = "config.json"


class HeadTarget(Protocol):
    """Target that a head is checked against: the config of a model, or only its sizes."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def has_head(self) -> bool:
        """True if it makes tokens."""
        ...


class ReadHead(NamedTuple):
    """Directory and configuration of a head. `make_head` reads the weights."""

    path: Path
    config: HeadConfig

    @classmethod
    def of(cls, path: Path | str) -> ReadHead:
        """Read the config of the head in the directory `path`. Raises the errors of `load_head`."""
        path = Path(path)
        if not os.path.isdir(path):
            raise ModelNotFoundError(f"{path}: no such directory")
        file = path / CONFIG
        if not os.path.lexists(file):
            raise ModelError(f"{path}: no {CONFIG}")
        values = Fields(read_json_object(file, MAX_CONFIG_BYTES), str(file))
        with HeadTensors(path) as tensors:
            return cls(path, read_head_config(values, tensors.shapes))

    def check(self, target: HeadTarget) -> None:
        """Raise `ModelError` unless the head fits the target."""
        config, source = self.config, self.path / CONFIG
        if not target.has_head:
            raise ModelError(f"{self.path}: a head can't draft for a model that makes no tokens")
        self.layers_read(target)
        hidden = [config.hidden_size]
        if isinstance(config, Eagle3Config):
            own = config.has_embedding and config.has_output
            hidden = [config.target_hidden_size, *([] if own else hidden)]
        sizes = [("hidden size", size, target.hidden_size) for size in hidden]
        if config.vocab_size is not None:
            sizes.append(("number of tokens", config.vocab_size, target.vocab_size))
        for name, size, wanted in sizes:
            if size != wanted:
                raise ModelError(
                    f"{source}: the head's {name} must be that of the target, {wanted}, got {size}"
                )

    def layers_read(self, target: HeadTarget) -> tuple[int, ...]:
        """Return the target's layers that the head reads, as `kept_layers` for `Decoder`.

        Raises `ModelError` for a layer that the target lacks."""
        try:
            return self.config.layers_read(target.num_layers)
        except ModelError as error:
            raise type(error)(f"{self.path / CONFIG}: {error}") from error
