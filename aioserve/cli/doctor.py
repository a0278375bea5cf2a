"""`aioserve doctor [MODEL]`: shows what this machine and this installation have.

Every probe fails alone. Missing parts are no error, except the model that is named.
"""

from __future__ import annotations

import importlib.util
import json as json_module
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from aioserve.arguments import counted
from aioserve.assets import EMBEDDED_MODELS, model_path
from aioserve.capacity.sizes import count_parameters
from aioserve.capacity.weights import weights_of
from aioserve.cli._interrupts import leaving_at_once
from aioserve.errors import ConfigError, ModelError
from aioserve.execution.cuda_driver import Card, find_driver
from aioserve.execution.process_memory import available_memory_bytes
from aioserve.formats.weights import CUDA_ATTENTION
from aioserve.models.files import ModelFiles, model_files
from aioserve.models.identity import computation_digest, weights_digest
from aioserve.models.limits import too_large
from aioserve.models.resolve import resolve
from aioserve.plugins import PluginRegistry

__all__ = ["compute_facts", "device_facts", "doctor", "everything", "facts_of_model"]


def doctor(model: str | None = None, /, *, digests: bool = False, json: bool = False) -> None:
    """Show what was found: instruction sets, threads, torch, packages for GPUs, policies, models.

    Args:

        model: Also show if this model can be run: a model directory, a GGUF file, an embedded
            model, or a hub id in the local cache.
        digests: Also show SHA-256 digests of the model: of its weights as they are stored, and of
            what is computed with them. All weights are read for that. Equal digests on two machines
            mean the same model, whatever its files are called. Neither digest covers the tokenizer
            or the chat template.
        json: Print JSON instead of a table.
    """
    if digests and model is None:
        raise ConfigError("digests are those of a model: name one", argument="digests")
    with leaving_at_once():
        sections = {} if model is None else {"model asked for": facts_of_model(model)}
        if digests and model is not None:
            sections["model asked for"] |= _guarded(lambda: _digests(model_files(resolve(model))))
        sections = everything() | sections
    if json:
        print(json_module.dumps(sections, indent=2))
        return
    from rich.table import Table

    from aioserve.cli._console import plain_console

    table = Table(box=None, show_header=False, pad_edge=False)
    for section, facts in sections.items():
        for index, (name, value) in enumerate(facts.items()):
            table.add_row("" if index else section, name.replace("_", " "), _shown(value))
    plain_console().print(table)


def _shown(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} ({inner})" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


Facts = dict[str, Any]


def everything() -> dict[str, Facts]:
    """Return all sections of `aioserve doctor`. A probe that fails shows its error in its
    section.
    """
    probes: dict[str, Callable[[], Facts]] = {
        "aioserve": _installation,
        "cpu": _cpu,
        "kernels": _kernels,
        "backend": _backend,
        "memory": _memory,
        "torch": _torch,
        "cupy": _cupy,
        "triton": partial(_package, "triton", "triton"),
        "flashinfer": partial(_package, "flashinfer", "flashinfer-python"),
        "gpu": _gpu,
        "policies": _policies,
        "model": _embedded_model,
    }
    return {name: _guarded(probe) for name, probe in probes.items()}


def facts_of_model(name: str) -> Facts:
    """Return the path of a model, and facts of its files.

    Problems of the files are facts too. Raises `ModelNotFoundError` if there is no model of that
    name.
    """
    path = resolve(name)
    facts = {"name": name, "path": str(path)}
    return facts | _guarded(lambda: _facts_of_files(model_files(path)))


def _facts_of_files(files: ModelFiles) -> Facts:
    config, weights = files.config(), files.weight_file_bytes()
    why = too_large(config, CUDA_ATTENTION)
    refused = {} if why is None else {"on_a_gpu": f"refused: {why}"}
    return {
        "architecture": config.architecture,
        "takes": "text, not the images that it could" if config.is_text_alone else "text",
        "dtype": config.dtype,
        "parameters": count_parameters(config).total,
        "weight_files": len(weights),
        "weights_gib": _gib(sum(weights)),
        "formats": _formats(files),
        "tokenizer": files.why_no_tokenizer() is None,
        "chat_template": files.chat_template() is not None,
        **refused,
    }


def _digests(files: ModelFiles) -> Facts:
    config = files.config()
    with files.weights(config) as stored:
        weights = weights_digest(stored, config)
    computation = computation_digest(config, config.max_position_embeddings)
    return {"weights_sha256": weights.hex(), "computation_sha256": computation.hex()}


def _formats(files: ModelFiles) -> Facts:
    """Return the formats of the weights, with the memory that each takes on a CPU."""
    try:
        formats = weights_of(files).on_cpu.formats
    except ModelError as error:
        return {"error": str(error)}
    return {
        one.format: f"{counted(one.tensors, 'tensor')}, {one.held_bytes / 2**20:,.1f} MiB held on "
        "a CPU"
        for one in formats
    }


def compute_facts() -> Facts:
    """Return what determines the speed of steps, in one line: for benchmark results."""
    facts = _guarded(_cpu) | _guarded(_kernels)
    return {name: facts.get(name) for name in ("isa", "threads", "processor")}


def device_facts(device: str) -> Facts:
    """Return facts of the device that an engine runs on, "cpu" or "cuda:N"."""
    if device == "cpu":
        return {"device": device} | compute_facts()
    found = _guarded(lambda: {"card": _cards()[int(device.partition(":")[2])].name})
    return {"device": device, "card": found.get("card", found.get("error"))}


def _guarded(probe: Callable[[], Facts]) -> Facts:
    try:
        return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _installation() -> Facts:
    return {
        "version": metadata.version("aioserve"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }


def _cpu() -> Facts:
    return {"processor": _processor(), "cpus": os.cpu_count()}


def _kernels() -> Facts:
    from aioserve import _native

    info = _native.cpu_info()
    info["integers"] = (
        f"int8 activations, as {info.pop('integer_isa')} multiplies them with weights of 4 and 8 "
        "bits"
    )
    return info


def _backend() -> Facts:
    from aioserve.ops import backend_named

    return {"used": backend_named().name}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> Facts:
    return {
        "total_gib": _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "available_gib": _gib(available_memory_bytes()),
    }


def _gib(count: int) -> float:
    return round(count / 2**30, 2)


def _torch() -> Facts:
    import torch

    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }


def _cupy() -> Facts:
    if importlib.util.find_spec("cupy") is None:
        return {"installed": False}
    import cupy  # pyright: ignore[reportMissingImports]

    return {"installed": True, "version": cupy.__version__, "available": cupy.is_available()}


def _package(name: str, distribution: str) -> Facts:
    """Return facts of a package without importing it, which would take seconds."""
    if importlib.util.find_spec(name) is None:
        return {"installed": False}
    return {"installed": True, "version": metadata.version(distribution)}


def _gpu() -> Facts:
    driver = find_driver()
    if driver is None:
        return {"driver": "not installed", "cards": {}}
    cards = {
        f"cuda:{index} {card.name}": f"{_gib(card.memory_bytes)} GiB, "
        f"compute capability {'.'.join(map(str, card.capability))}"
        for index, card in enumerate(driver.cards)
    }
    return {"driver": f"CUDA {'.'.join(map(str, driver.cuda_version))}", "cards": cards}


def _cards() -> tuple[Card, ...]:
    driver = find_driver()
    return () if driver is None else driver.cards


def _policies() -> Facts:
    registry = PluginRegistry()
    found = {name: str(offer.origin) for name, offer in registry.policies.items()}
    return {"found": found, "broken": [str(broken) for broken in registry.broken]}


def _embedded_model() -> Facts:
    facts: Facts = {}
    for name in EMBEDDED_MODELS:
        path = model_path(name)
        facts[name] = None if path is None else str(path)
        if path is not None:
            size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            facts[f"{name}_mib"] = round(size / 2**20, 1)
    return facts
