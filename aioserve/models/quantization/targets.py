"""Models and target paths of `aioserve quantize`, which writes next to the target until the end."""

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
    """Sizes of a model and of its quantised copy."""

    read_bytes: int
    """Bytes of all tensors of the model."""
    written_bytes: int
    """Bytes of all weight files of the copy."""
    num_files: int
    """Number of weight files of the copy."""


def plain_config(files: ModelFiles) -> DecoderConfig:
    """Read the config of a model directory with plain weights. Raises `ConfigError` for others."""
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
    """Resolve `out` to a directory to write. Raises `ConfigError` unless it is empty or missing."""

    def is_free(target: Path) -> bool:
        return not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir()))

    return _free(out, "a directory that is empty or not there yet", is_free)


def free_file(out: Path, ending: str) -> Path:
    """Resolve `out` to a file to write, which must have the `ending`.

    Raises `ConfigError` if it exists or ends otherwise."""
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
    """Create a directory next to `target`, and remove it at the end unless it was renamed."""
    with ExitStack() as stack:
        try:
            hidden = tempfile.TemporaryDirectory(
                dir=target.parent, prefix=".aioserve-quantize-", ignore_cleanup_errors=True
            )
            directory = Path(stack.enter_context(hidden)) / "model"
            directory.mkdir()  # with the usual permissions of new directories
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
    """Give the finished file its name. Raises `ConfigError` if the name is taken."""
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
