"""Downloads of models from the Hugging Face hub, into the cache of `huggingface_hub`.

Which files a model consists of is known by `aioserve.models.resolve`, which finds it there
afterwards.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from aioserve.cli._interrupts import leaving_at_once
from aioserve.errors import ModelError, ModelNotFoundError
from aioserve.models.resolve import INSTALL_HUB, OTHER_FILES, WANTED_FILES

__all__ = ["download", "is_hub_id"]

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
BETWEEN_LOOKS_SECONDS = 0.2


def is_hub_id(name: str) -> bool:
    """Whether it has the shape OWNER/NAME. A bare name may be in the cache, but is not asked for:
    it may be a prompt, or the name of a file."""
    return HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def download(hub_id: str) -> None:
    """Put the model into the cache; what an earlier download left there is not loaded again.

    Draws a bar on stderr where that is a terminal, else prints one line as it begins. Ctrl-C ends
    the process. Raises `ModelNotFoundError` for a model that can't be had (there is none, it is
    gated, the hub may not be asked), and `ModelError` where the hub can't be reached.
    """
    with leaving_at_once():
        try:
            import huggingface_hub
        except ImportError as error:
            raise ModelNotFoundError(
                f"{hub_id} is not here, and huggingface_hub, which downloads models, is not "
                f"installed: {INSTALL_HUB}"
            ) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            huggingface_hub.utils.logging.set_verbosity_error()
            huggingface_hub.utils.disable_progress_bars()
            try:
                sizes = _wanted(hub_id, _listed(hub_id))
                with _shown(hub_id, sizes):
                    huggingface_hub.snapshot_download(
                        hub_id,
                        allow_patterns=list(WANTED_FILES),
                        ignore_patterns=list(OTHER_FILES),
                    )
            except (ModelError, KeyboardInterrupt):
                raise
            except Exception as error:
                # The library raises errors of its own, of the HTTP library under it, which was
                # another one before, and OSErrors of disks.
                raise _named(hub_id, error) from error


def _listed(hub_id: str) -> dict[str, int | None]:
    """The files of the repository and their sizes in bytes."""
    import huggingface_hub

    found = huggingface_hub.HfApi().model_info(hub_id, files_metadata=True)
    return {one.rfilename: one.size for one in found.siblings or ()}


def _wanted(hub_id: str, listed: dict[str, int | None]) -> dict[str, int | None]:
    """The files that a model may be read from. Raises `ModelNotFoundError` where they make none."""
    wanted = {
        name: size
        for name, size in listed.items()
        if any(fnmatch(name, pattern) for pattern in WANTED_FILES)
        and not any(fnmatch(name, pattern) for pattern in OTHER_FILES)
    }
    if "config.json" in wanted and any(name.endswith(".safetensors") for name in wanted):
        return wanted
    if any(name.lower().endswith(".gguf") for name in listed):
        why = (
            f"it has GGUF files alone: take one of them with `hf download {hub_id} FILE` and name "
            "its path"
        )
    elif "config.json" not in wanted:
        why = "it has no config.json"
    else:
        why = "it has no .safetensors files"
    raise ModelNotFoundError(f"{hub_id} can't be used: {why}")


@contextmanager
def _shown(hub_id: str, sizes: dict[str, int | None]) -> Iterator[None]:
    """A bar for as long as the block runs, or a line before it."""
    from rich.console import Console
    from rich.filesize import decimal

    known = [size for size in sizes.values() if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    if not sys.stderr.isatty():
        size = "" if total is None else f" ({decimal(total)})"
        print(f"downloading {hub_id}{size} from {_endpoint()}", file=sys.stderr, flush=True)
        yield
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    speed = (TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, *speed, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(f"downloading {hub_id}", total=total)
        done = threading.Event()
        # The library tells of bytes only through bars that it draws itself, another way in each
        # version. What has come is in the cache, whose folders it documents.
        blobs = _blobs(hub_id)

        def look() -> None:
            while not done.wait(BETWEEN_LOOKS_SECONDS):
                bars.update(task, completed=_bytes_in(blobs))

        looking = threading.Thread(target=look, name="aioserve download bar", daemon=True)
        looking.start()
        try:
            yield
        finally:
            done.set()
            looking.join()


def _blobs(hub_id: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "blobs"


def _bytes_in(folder: Path) -> int:
    total = 0
    try:
        for entry in os.scandir(folder):
            try:
                total += entry.stat().st_size
            except OSError:  # it was renamed meanwhile
                continue
    except OSError:  # it isn't there yet
        return 0
    return total


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _named(hub_id: str, error: Exception) -> Exception:
    """What the library raised, as an error that says what to do about it."""
    from huggingface_hub import errors

    hub = _endpoint()
    causes = _causes(error)

    def one(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if one(errors.GatedRepoError):
        return ModelNotFoundError(
            f"{hub_id} is gated: ask for access at {hub}/{hub_id}, then log in with `hf auth login`"
        )
    if one(errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{hub_id} is no directory here, and {hub} has no such model, or a private one: then "
            "log in with `hf auth login`"
        )
    if one(errors.HFValidationError):
        return ModelNotFoundError(f"{hub_id} is no directory here, and no id that the hub knows")
    if one(errors.OfflineModeIsEnabled):
        return ModelNotFoundError(
            f"{hub_id} is not in the local Hugging Face cache, and HF_HUB_OFFLINE forbids to "
            "download it"
        )
    if (status := _status(causes)) is not None:
        return ModelError(f"{hub_id} can't be downloaded: {hub} answered {status}")
    if isinstance(error, OSError) and error.errno is not None:  # a full disk
        return ModelError(f"{hub_id} can't be downloaded: {error}")
    return ModelError(
        f"{hub_id} is not in the local Hugging Face cache, and {hub} can't be reached: "
        f"{_first_line(causes[-1])}"
    )


def _causes(error: BaseException) -> list[BaseException]:
    """The error, and what it was raised from, the first cause at the end."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def _status(causes: list[BaseException]) -> int | None:
    """The HTTP status of the response that one of them is about."""
    for cause in causes:
        response: Any = getattr(cause, "response", None)
        if (status := getattr(response, "status_code", None)) is not None:
            return int(status)
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
