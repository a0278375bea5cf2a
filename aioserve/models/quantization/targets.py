"""What `aioserve quantize` reads and where it writes: beside the target until all is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aioserve.errors import ConfigError
from aioserve.models.config import DecoderConfig
from aioserve.models.files import ModelDirectory
from aioserve.models.model_files import ModelFiles

__all__ = [
    "Written",
    "beside",
    "check_space",
    "free_directory",
    "free_file",
    "move_directory",
    "move_file",
    "plain_config",
]


@dataclass(frozen=True, slots=True)
class Written:
    """Sizes of what was read and written, in bytes."""

    read_bytes: int
    """All tensors of the model."""
    written_bytes: int
    """All weight files of the copy."""
    num_files: int
    """Weight files of the copy."""


def plain_config(files: ModelFiles) -> DecoderConfig:
    """The config of a model in a directory, whose weights are plain. Raises `ConfigError` for
    others."""
    if not isinstance(files, ModelDirectory):
        raise ConfigError(
            f"model must be a directory with .safetensors, got the GGUF file {files.path}",
            argument="model",
            value=str(files.path),
        )
    config = files.config()
    if config.quantization is not None:
        raise ConfigError(
            f"model must have plain weights, and those of {files.path} are quantised already: its "
            f"quantization_config says {config.quantization.name}",
            argument="model",
            value=str(files.path),
        )
    return config


def free_directory(out: Path) -> Path:
    """Where `out` leads to. Raises `ConfigError` for what is there already."""

    def is_free(target: Path) -> bool:
        return not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))

    return _free(out, "a directory that is empty or not there yet", is_free)


def free_file(out: Path, ending: str) -> Path:
    """Where `out` leads to: a file with that ending. Raises `ConfigError` for what is there
    already."""
    if out.suffix != ending:
        raise _refused(out, f"must end with {ending}, got {out}")
    return _free(out, "a file that is not there yet", lambda _: not os.path.lexists(out))


def _free(out: Path, what: str, is_free: Callable[[Path], bool]) -> Path:
    try:
        target = Path(os.path.realpath(out))
        free, there = is_free(target), target.parent.is_dir()
    except (OSError, ValueError) as error:
        raise _unwritable(out, error) from error
    if not free:
        raise _refused(out, f"must be {what}, got {out}")
    if not there:
        raise _refused(out, f"must be in a directory that is there, and {target.parent} isn't one")
    return target


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A new directory that is removed with all in it where it wasn't renamed meanwhile."""
    with ExitStack() as stack:
        try:
            hidden = tempfile.TemporaryDirectory(
                dir=target.parent, prefix=".aioserve-quantize-", ignore_cleanup_errors=True
            )
            directory = Path(stack.enter_context(hidden)) / "model"
            directory.mkdir()  # with the permissions that new directories have
        except OSError as error:
            raise _unwritable(target, error) from error
        yield directory


def _unwritable(out: Path, error: OSError | ValueError) -> ConfigError:
    why = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"out: {out} can't be written: {why}", argument="out", value=str(out))


def check_space(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if num_bytes > free:
        raise ConfigError(
            f"out: the weights take {num_bytes} bytes, and {target.parent} has {free} left",
            argument="out",
            value=str(target),
        )


def move_directory(directory: Path, target: Path, out: Path) -> None:
    try:
        with suppress(FileNotFoundError):
            target.rmdir()
        directory.rename(target)
    except OSError as error:
        raise _unwritable(out, error) from error


def move_file(file: Path, target: Path, out: Path) -> None:
    """Give the finished file its name. Raises `ConfigError` where something has taken it."""
    try:
        try:
            os.link(file, target)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            file.rename(target)
    except OSError as error:
        raise _unwritable(out, error) from error


def _refused(out: Path, why: str) -> ConfigError:
    return ConfigError(f"out {why}", argument="out", value=str(out))
