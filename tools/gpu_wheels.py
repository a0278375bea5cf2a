"""Finds packages that `gpu_check` needs and a Python lacks, and the command to fetch their
wheels.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["WHEELS", "fetching", "missing", "missing_given", "packages", "pinned"]

ROOT = Path(__file__).resolve().parents[1]

GIVEN = ("torch", "triton", "numpy")
"""Packages that can't be carried; CuPy is one more, with a name for each CUDA.

They are too large, and made for the machine.
"""
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
WHEELS = (
    # for aioserve
    *("anyio", "attrs", "cyclopts", "docstring_parser", "idna", "Jinja2", "llguidance", "regex"),
    *("markdown-it-py", "MarkupSafe", "mdurl", "msgspec", "pluggy", "Pygments", "rich"),
    *("rich-rst", "safetensors", "tokenizers", "typing_extensions"),
    # to build it
    *("cmake", "nanobind", "ninja", "packaging", "pathspec", "scikit_build_core"),
    # to test it
    *("hypothesis", "iniconfig", "py-cpuinfo2", "pytest", "pytest-asyncio", "pytest-benchmark"),
    *("pytest-timeout", "sortedcontainers"),
)
"""Packages of constraints.txt. If transformers is installed, models are compared with it too."""
PLATFORMS = tuple(
    f"{name}_x86_64"
    for name in (
        "manylinux_2_34",
        "manylinux_2_31",
        "manylinux_2_28",
        "manylinux_2_17",
        "manylinux2014",
    )
)


def pins() -> dict[str, str]:
    """Return versions by name, as constraints.txt has them."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if "==" in line and line[0] != "#")
    return {normal(name): version for name, _, version in pairs}


def floors() -> dict[str, str]:
    """Return the oldest versions that suffice, for the packages with one in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    named = [*project["project"]["dependencies"], *extras["test"], *extras["testing"]]
    named += [*extras["cuda12"], *extras["cuda13"], *project["build-system"]["requires"]]
    found = (re.match(r"([\w.-]+)(?:\[[\w,]*\])?>=([\d.]+)", line) for line in named)
    return {normal(match[1]): match[2] for match in found if match}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def installed(name: str) -> str | None:
    """Return the version that this Python has."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages(folder: Path) -> dict[str, str | None]:
    """Return the versions that are used: those in the folder, and else this Python's."""
    found = metadata.distributions(path=[str(folder)])
    brought = {normal(each.name): each.version for each in found}
    names = (*GIVEN, *CUPY, "transformers", *WHEELS, "aioserve")
    return {name: brought.get(normal(name)) or installed(name) for name in names}


def lacks(name: str, found: str | None) -> bool:
    """Return true if it is missing, or older than the oldest version that suffices."""
    return found is None or release(found) < release(floors().get(normal(name), ""))


def missing(names: Sequence[str] = WHEELS) -> list[str]:
    """Return the packages that this Python lacks."""
    return [name for name in names if lacks(name, installed(name))]


def missing_given() -> list[str]:
    """Return the packages that can't be carried and that this Python lacks."""
    found = missing(GIVEN)
    if all(lacks(name, installed(name)) for name in CUPY):
        found.append(" or ".join(CUPY[:2]))
    return found


def pinned(names: Sequence[str]) -> list[str]:
    versions = pins()
    return [f"{name}=={versions[normal(name)]}" for name in names]


def fetching(names: Sequence[str], python: str) -> str:
    """Return the command for a machine with network, for a version of Python.

    With platforms given, pip takes only those.
    """
    command = ["python3", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    return shlex.join([*command, "--dest", "wheels", *pinned(names)])
