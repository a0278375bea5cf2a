"""Environments have what is asked for, with what that requires, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.environments import Environments, link_files


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    return Environments(tmp_path_factory.mktemp("environments"))


def test_a_directory_of_two_packages_is_linked_in_part(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    place.mkdir()
    owned = {
        "one": [("shared", "one", "a.py"), ("shared", "__init__.py"), ("one.py",), ("..", "bin")],
        "two": [("shared", "two", "b.py"), ("shared", "__init__.py"), ("two.py",)],
    }
    for path in (one for paths in owned.values() for one in paths if one[0] != ".."):
        file = source.joinpath(*path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    link_files(owned, frozenset({"one"}), source, place)
    found = {str(path.relative_to(place)) for path in place.rglob("*")}
    assert found == {"one.py", "shared", "shared/__init__.py", "shared/one"}
    assert (place / "shared" / "one" / "a.py").is_file()


def test_requirements_bring_what_they_require_once(
    environments: Environments, tmp_path: Path
) -> None:
    (place,), missing = environments.sites(["aioserve[testing]", "no-such-package"], tmp_path)
    assert missing == {"no-such-package"}
    assert {"hypothesis", "sortedcontainers"} <= {path.name for path in place.iterdir()}
    assert not {"pytest", "numpy", "aioserve"} & {path.name for path in place.iterdir()}
    assert environments.sites([".[testing]"], tmp_path)[0] == [place]
    assert environments.sites(["numpy", "."], tmp_path) == ([], set())


def test_a_project_is_importable_with_its_entry_points(
    environments: Environments, tmp_path: Path
) -> None:
    places, missing = environments.sites(["./examples/policies"], tmp_path)
    assert not missing
    (place,) = places
    (info,) = place.glob("*.dist-info")
    assert "[aioserve]\nandes = published_policies.andes\n" in (
        info / "entry_points.txt"
    ).read_text(encoding="utf-8")
    (path,) = place.glob("*.pth")
    assert (Path(path.read_text(encoding="utf-8").strip()) / "published_policies").is_dir()
