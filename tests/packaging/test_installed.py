"""Installation as a stranger does it: sdist and wheel are built, and the wheel installed, outside
the checkout.

The installed wheel is made from the sdist. Where tests may be slow, its native module is compiled
there. Otherwise it is the checkout's module, which was made of the same sources. The environment
has the present third-party packages and no index. So pip either finds every requirement of the
wheel satisfied or fails.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from aioserve import _native

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]
IMPORTABLE = {"aioserve", "aioserve_main", "aioserve_plugins"}
BUILD_SDIST = "import scikit_build_core.build as b, sys; print(b.build_sdist(sys.argv[1]))"
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")
NOT_COMPILED = ("--config-settings=wheel.cmake=false",)
LIMIT_SECONDS = 1000

STREAM = """
import asyncio
from aioserve import Engine, SamplingParams

async def main():
    async with Engine() as engine:
        messages = [{"role": "user", "content": "What does json.dumps do?"}]
        async for token in engine.stream(messages, SamplingParams(temperature=0, max_tokens=24)):
            print(token.text, end="")
        print(f"\\n[{engine.dump()['policy']}]")

asyncio.run(main())
"""

PLACES = """
import aioserve, aioserve._native, aioserve.plugins, aioserve_main, aioserve_plugins
for module in (aioserve, aioserve._native, aioserve.plugins, aioserve_main, aioserve_plugins):
    print(module.__file__)
"""


def run(*command: str | Path, cwd: Path, path: str | None = None) -> str:
    """Standard output of a command that must not fail. Nothing of this checkout is on its path."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key == "AIOSERVE_OPS"  # the CPU, whatever is in this machine
        or (key not in {"PYTHONPATH", "VIRTUAL_ENV"} and not key.startswith(("AIOSERVE_", "PIP_")))
    }
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    scripts = path or sysconfig.get_path("scripts")
    environment["PATH"] = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    shown = f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, shown
    return done.stdout


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def text_in_wheel(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (found,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(found).decode()


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sdist")
    name = run(sys.executable, "-c", BUILD_SDIST, place, cwd=ROOT).split()[-1]
    return place / name


@pytest.fixture(
    scope="session",
    params=["with the checkout's module", pytest.param("compiled", marks=pytest.mark.slow)],
)
def wheel(
    request: pytest.FixtureRequest, sdist: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Built from the sdist."""
    place = tmp_path_factory.mktemp("wheel")
    is_compiled = request.param == "compiled"
    pip = (sys.executable, "-m", "pip", "wheel", *OFFLINE, *(() if is_compiled else NOT_COMPILED))
    run(*pip, "--wheel-dir", place, sdist, cwd=place)
    (made,) = place.glob("*.whl")
    if not is_compiled:
        add_to_wheel(made, Path(_native.__file__))
    return made


def add_to_wheel(wheel: Path, module: Path) -> None:
    """A module of `aioserve`, with its line in the wheel's list of files."""
    name = f"aioserve/{module.name}"
    content = module.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel) as archive:
        files = {one: archive.read(one) for one in archive.namelist()}
    (record,) = (one for one in files if one.endswith(".dist-info/RECORD"))
    files[name] = content
    files[record] += f"{name},sha256={digest},{len(content)}\n".encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for one, content in files.items():
            archive.writestr(one, content)


class Installed:
    """An environment of its own with the wheel in it."""

    def __init__(self, place: Path, wheel: Path) -> None:
        venv.create(place, symlinks=True)
        self.place = place
        self.python = place / "bin" / "python"
        self.elsewhere = place.parent
        paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
        self.site_packages = Path(paths["purelib"])
        for key in ("purelib", "platlib"):
            link_third_parties(Path(sysconfig.get_path(key)), self.site_packages)
        self.run("-m", "pip", "install", "--no-index", wheel)

    def run(self, *arguments: str | Path) -> str:
        """Output of this environment's Python."""
        return run(self.python, *arguments, cwd=self.elsewhere, path=str(self.place / "bin"))

    def aioserve(self, *arguments: str) -> str:
        """Output of the command `aioserve`."""
        command = self.place / "bin" / "aioserve"
        return run(command, *arguments, cwd=self.elsewhere, path=str(self.place / "bin"))


def link_third_parties(installed: Path, site_packages: Path) -> None:
    """All packages but aioserve's own. Without the .pth files: one of them finds this checkout."""
    for entry in installed.iterdir():
        ours = "aioserve" in entry.name.lower()
        link = site_packages / entry.name
        if not (ours or entry.suffix == ".pth" or entry.name == "__pycache__" or link.exists()):
            link.symlink_to(entry)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("elsewhere") / "venv", wheel)


def modules_of_the_checkout() -> set[str]:
    """Every file of the packages, as a wheel names it."""
    found = set()
    folders = (ROOT / "aioserve", ROOT / "aioserve_main", ROOT / "plugins" / "aioserve_plugins")
    for package in folders:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
                found.add(path.relative_to(package.parent).as_posix())
    return found


@pytest.mark.more
def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    names = {name for name in names_in_wheel(wheel) if ".dist-info/" not in name}
    native = {name for name in names if name.startswith("aioserve/_native.") and ".so" in name}
    assert len(native) == 1
    assert names - native == modules_of_the_checkout()
    assert {"aioserve/py.typed", "aioserve/plugins/__init__.py"} < names
    assert "aioserve/assets/pyhelp/model.safetensors" in names
    assert {PurePosixPath(name).parts[0] for name in names} == IMPORTABLE


def test_the_sdist_has_the_sources_and_not_what_is_about_them(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        tops = {PurePosixPath(name).parts[1] for name in archive.getnames()}
    assert tops - {"PKG-INFO", ".gitignore"} == {
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "aioserve",
        "aioserve_main",
        "native",
        "plugins",
        "pyproject.toml",
    }


def test_the_sdist_has_every_source_of_the_module(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        found = {
            "/".join(PurePosixPath(member.name).parts[1:])
            for member in archive.getmembers()
            if member.isfile() and PurePosixPath(member.name).parts[1] == "native"
        }
    native = ROOT / "native"
    assert found == {
        path.relative_to(ROOT).as_posix() for path in native.rglob("*") if path.is_file()
    }


def test_a_wheel_made_from_the_checkout_has_the_files_of_one_made_from_the_sdist(
    wheel: Path, tmp_path: Path
) -> None:
    pip = (sys.executable, "-m", "pip", "wheel", *OFFLINE, *NOT_COMPILED)
    run(*pip, "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (made,) = tmp_path.glob("*.whl")
    native = {name for name in names_in_wheel(wheel) if "/_native." in name and ".so" in name}
    assert names_in_wheel(made) == names_in_wheel(wheel) - native
    for name in ("METADATA", "entry_points.txt"):
        assert text_in_wheel(made, name) == text_in_wheel(wheel, name)


def test_every_bundled_policy_is_registered_by_an_entry_point(wheel: Path) -> None:
    text = text_in_wheel(wheel, "entry_points.txt")
    points = configparser.ConfigParser(delimiters=("=",))
    points.read_string(text)
    modules = {
        path.stem
        for path in (ROOT / "plugins" / "aioserve_plugins").glob("*.py")
        if not path.stem.startswith("_")
    }
    assert dict(points["aioserve"]) == {name: f"aioserve_plugins.{name}" for name in modules}


@pytest.mark.more
def test_everything_is_imported_from_the_installed_wheel(installed: Installed) -> None:
    for place in installed.run("-c", PLACES).split():
        assert Path(place).is_relative_to(installed.site_packages)


def test_the_installed_engine_streams_with_the_default_policy(installed: Installed) -> None:
    answer, policy = installed.run("-c", STREAM).strip().rsplit("\n", 1)
    assert re.fullmatch(r"\[fcfs \(aioserve [\d.]+\)\]", policy)
    assert "json.dumps" in answer or "JSON" in answer


@pytest.mark.more
def test_a_type_checker_knows_every_public_type_of_the_installed_package(
    installed: Installed,
) -> None:
    """pyright's own measure for a package with py.typed. It looks for the package with the first
    `python` on the path."""
    shown = installed.run("-m", "pyright", "--verifytypes", "aioserve", "--ignoreexternal")
    assert str(installed.site_packages / "aioserve" / "py.typed") in shown
    assert "Type completeness score: 100%" in shown


def test_the_installed_command_lists_the_bundled_policies(installed: Installed) -> None:
    shown = installed.aioserve("plugins", "--all")
    for path in (ROOT / "plugins" / "aioserve_plugins").glob("[a-z]*.py"):
        assert path.stem in shown
    assert "broken" not in shown


def test_the_installed_command_simulates(installed: Installed) -> None:
    options = ("--synthetic", "conversations", "--num-requests", "20", "--policy", "deadline")
    shown = json.loads(installed.aioserve("simulate", *options, "--json"))
    assert shown["policies"]["deadline"]["finished"] == 20
