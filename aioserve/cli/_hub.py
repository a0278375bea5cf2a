"""Downloads of models from the Hugging Face hub, into the cache of `huggingface_hub`.

`aioserve.models.hub` knows which files belong to a model, and finds them there afterwards.
"""

from __future__ import annotations

import glob
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aioserve.cli._interrupts import leaving_at_once
from aioserve.errors import ModelError, ModelNotFoundError
from aioserve.models.gguf.choosing import AmbiguousModelError
from aioserve.models.hub import INSTALL_HUB, HubName, wanted_files

__all__ = ["download"]

BETWEEN_LOOKS_SECONDS = 0.2


def download(name: HubName) -> None:
    """Download the model into the cache, except files that an earlier download left there.

    Draws a bar on stderr if it is a terminal, else prints one line at the start. Ctrl-C ends the
    process. Raises `ModelNotFoundError` if the model doesn't exist, is gated, or the hub may not be
    asked. Raises `ModelError` if the hub can't be reached.
    """
    hub_id = name.id
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
                sizes = _wanted(name, _listed(hub_id))
                with _shown(name, sizes):
                    huggingface_hub.snapshot_download(
                        hub_id, allow_patterns=[glob.escape(file) for file in sizes]
                    )
            except (ModelError, KeyboardInterrupt):
                raise
            except Exception as error:
                # The library raises errors of its own, errors of its HTTP library, which has
                # changed once, and OSErrors of disks.
                raise _named(hub_id, error) from error


def _listed(hub_id: str) -> dict[str, int | None]:
    """Return the files of the repository with their sizes in bytes."""
    import huggingface_hub

    found = huggingface_hub.HfApi().model_info(hub_id, files_metadata=True)
    return {one.rfilename: one.size for one in found.siblings or ()}


def _wanted(name: HubName, listed: dict[str, int | None]) -> dict[str, int | None]:
    """Return the files that the model is read from. Raises `ModelNotFoundError` if they make no
    model.
    """
    try:
        return {file: listed[file] for file in wanted_files(name, listed)}
    except AmbiguousModelError as error:
        raise ModelNotFoundError(f"{name.id} can't be used: {error}") from error
    except KeyError as error:
        raise ModelNotFoundError(
            f"{name.id} can't be used: it lacks {error.args[0]}, a part of the model"
        ) from error


@contextmanager
def _shown(name: HubName, sizes: dict[str, int | None]) -> Iterator[None]:
    """Draw a bar while the block runs, or print a line before it."""
    from rich.console import Console
    from rich.filesize import decimal

    known = [size for size in sizes.values() if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    what = f"{name.id}/{next(iter(sizes))}" if _is_gguf(sizes) else name.id
    if not sys.stderr.isatty():
        size = "" if total is None else f" ({decimal(total)})"
        print(f"downloading {what}{size} from {_endpoint()}", file=sys.stderr, flush=True)
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
        task = bars.add_task(f"downloading {what}", total=total)
        done = threading.Event()
        # The library reports bytes only through its own bars, differently in each version. So look
        # at the cache instead, whose folders it documents.
        blobs = _blobs(name.id)

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


def _is_gguf(files: Iterable[str]) -> bool:
    return all(file.lower().endswith(".gguf") for file in files)


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
    """Return the library's error as one that says what to do about it."""
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
    """Return the error and its causes, the first cause last."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def _status(causes: list[BaseException]) -> int | None:
    """Return the HTTP status of the first response among the causes."""
    for cause in causes:
        response: Any = getattr(cause, "response", None)
        if (status := getattr(response, "status_code", None)) is not None:
            return int(status)
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
