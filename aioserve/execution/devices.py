"""Chooses the device of an engine. Imports neither torch nor CuPy: files are read before those."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from pathlib import Path

from aioserve.config import EngineConfig, names_cpu_backend
from aioserve.errors import ConfigError
from aioserve.execution.cuda_driver import Driver, DriverError, find_driver

__all__ = ["MIN_CAPABILITY", "chosen_device", "missing_packages"]

logger: logging.Logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Ampere: the oldest GPUs that compute in bfloat16."""


def missing_packages() -> list[str]:
    """List packages that a GPU needs and that aren't installed. Imports nothing."""
    missing = [name for name in ("cupy", "triton") if importlib.util.find_spec(name) is None]
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        version = (Path(torch.origin).parent / "version.py").read_text(encoding="utf-8")
        if re.search(r"^cuda\b.*= *None", version, re.MULTILINE):
            missing.append("torch built for CUDA")
    return missing


def chosen_device(
    config: EngineConfig,
    driver: Callable[[], Driver | None] = find_driver,
    missing: Callable[[], list[str]] = missing_packages,
) -> str:
    """Choose the device: "cpu" or "cuda:N".

    "auto" takes the first usable GPU, unless the options name a backend for CPUs. If there are GPUs
    but none is usable, the log says why.

    Raises `ConfigError` for a CUDA device that can't be used, saying what is missing. Also raises
    it for options of CUDA devices if another device is used.
    """
    if config.device.startswith("cuda"):
        return _asked_for(config, driver, missing)
    chosen = "cpu"
    if config.device == "auto" and not names_cpu_backend(config.backend):
        chosen = _first_usable(driver, missing)
    if chosen == "cpu":
        _refuse_cuda_options(config)
    return chosen


def _asked_for(
    config: EngineConfig,
    driver: Callable[[], Driver | None],
    missing: Callable[[], list[str]],
) -> str:
    index = int(config.device.partition(":")[2] or 0)
    try:
        found = driver()
    except DriverError as error:
        why = str(error)
    else:
        why = _why_not(found, index, missing)
    if why is not None:
        raise ConfigError(
            f"device={config.device!r} can't be used: {why}",
            argument="device",
            value=config.device,
        )
    return f"cuda:{index}"


def _first_usable(driver: Callable[[], Driver | None], missing: Callable[[], list[str]]) -> str:
    try:
        found = driver()
    except DriverError as error:
        logger.warning("running on the CPU: %s", error)
        return "cpu"
    if found is None or not found.cards:
        return "cpu"
    reasons = [_why_not(found, index, missing) for index in range(len(found.cards))]
    if None in reasons:
        return f"cuda:{reasons.index(None)}"
    logger.warning("running on the CPU, although there is a GPU: %s", reasons[0])
    return "cpu"


def _why_not(found: Driver | None, index: int, missing: Callable[[], list[str]]) -> str | None:
    if found is None:
        return "there is no driver of NVIDIA's (libcuda.so.1) on this machine"
    if index >= len(found.cards):
        return f"the driver shows {len(found.cards)} GPUs, numbered from 0"
    card = found.cards[index]
    if card.capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (card.capability, MIN_CAPABILITY))
        return f"{card.name} has compute capability {have}, and {need} is needed"
    if absent := missing():
        extra = "cuda12" if found.cuda_version < (13, 0) else "cuda13"
        return f"{', '.join(absent)} must be installed: pip install 'aioserve[{extra}]'"
    return None


def _refuse_cuda_options(config: EngineConfig) -> None:
    defaults = (("graph_sizes", None), ("capture_graphs", True), ("attention", "auto"))
    for option, default in defaults:
        value = getattr(config, option)
        if value != default:
            raise ConfigError(
                f"{option}={value!r} has no effect on the CPU: leave it out, or choose "
                "a CUDA device",
                argument=option,
                value=value,
            )
